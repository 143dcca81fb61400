"""Tell a restart by torchrun whether this agent's ranks have begun the run before.

An agent counts each start of its ranks after the first as a restart, also those after a failure in
start-up, when there was no run yet. So ranks leave a mark before they begin or resume one:

    <logs of the agent>/trainckpt-begun

The folder is torchrun's own, one for each agent, and named by the path of a rank's error file:
`<logs of the agent>/attempt_<restarts>/<local rank>/error.json`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
MARK = "trainckpt-begun"


def leave_mark(environment: Mapping[str, str] | None = None) -> None:
    """Note that a run is about to begin here; without torchrun, nothing."""
    logs = _logs(os.environ if environment is None else environment)
    if logs is not None:
        with contextlib.suppress(OSError):
            (logs / MARK).touch()


def began_nothing(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if no earlier ranks of this agent have begun a run.

    False if that is not known, as after the folder was cleaned.
    """
    logs = _logs(os.environ if environment is None else environment)
    return logs is not None and (logs / "attempt_0").is_dir() and not (logs / MARK).exists()


def _logs(environment: Mapping[str, str]) -> Path | None:
    """Return the agent's folder, if it is where torchrun has it."""
    error_file = Path(environment.get(ERROR_FILE_VARIABLE, ""))
    start = f"attempt_{environment.get(RESTARTS_VARIABLE)}"
    is_known = error_file.is_absolute() and error_file.parent.parent.name == start
    return error_file.parents[2] if is_known else None
