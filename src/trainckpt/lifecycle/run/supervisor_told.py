"""Who supervises this launch, told by the supervisor itself, so that ranks notice when it is gone.

    <supervisor's folder>/supervisor.json    {"pid", "namespace"}

It is there before the ranks are, and goes with the folder when the supervisor ends by itself, which
it does after them. Whoever restores processes from a dump replaces it before they run again.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.living import lives
from trainckpt.lifecycle.run.told import folder_of_launch, namespace_of

if TYPE_CHECKING:
    from pathlib import Path

FILE = "supervisor.json"
MAX_BYTES = 4096


def spell() -> dict[str, str]:
    """The file that says that this process is the supervisor: name and text."""
    return {FILE: json.dumps({"pid": os.getpid(), "namespace": namespace_of("self")})}


def is_there() -> bool:
    """Whether this process has one, that was not killed."""
    folder = folder_of_launch()
    return folder is not None and not is_gone(folder)


def is_gone(folder: Path) -> bool:
    """Whether it was killed.

    Not where nobody says who it is, or where this process counts processes by other numbers, as in
    a container.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        with (folder / FILE).open("rb") as file:
            told = json.loads(file.read(MAX_BYTES))
        pid, namespace = told["pid"], told["namespace"]
        if type(pid) is int and 0 < pid < 2**31 and namespace:
            return bool(namespace == namespace_of("self")) and not lives(pid)
    return False
