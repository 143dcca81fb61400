"""The options of a command that says none itself: as its attempt has recorded them.

Whoever brings a run back may stand in another folder, in another shell: what was set for the run
when it was launched counts, but for what is set here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.lifecycle.run.options import Options


def read(facts: Mapping[str, Any]) -> Options:
    """The options, given an attempt's facts; without any they are this process's own.

    Raises:
        ConfigurationError: one is unreadable.
    """
    from trainckpt.lifecycle.run.options import read_options

    recorded = facts.get("env")
    known = recorded if isinstance(recorded, dict) else {}
    return read_options({}, {**known, **os.environ}, folder(facts))


def folder(facts: Mapping[str, Any]) -> Path:
    """Where the command was launched."""
    cwd = facts.get("cwd")
    return Path(cwd) if isinstance(cwd, str) else Path.cwd()
