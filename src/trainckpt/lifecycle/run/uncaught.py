"""The exit code of an error of ours that nobody caught, as the exit codes' table promises it.

Python ends with 1 after any uncaught exception, and schedulers act on the code. The traceback is
printed as ever. A SystemExit that leaves `sys.excepthook` ends the interpreter in order with its
code: whatever is registered with `atexit` runs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError

if TYPE_CHECKING:
    from types import TracebackType

_installed: list[bool] = []


def code_of(error: SystemExit) -> int:
    """What the process ends with, as its parent sees it: one byte, as Python makes it."""
    code = error.code
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1  # it is printed
    return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF


def install() -> None:
    """From now on; once a process."""
    if _installed:
        return
    _installed.append(True)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, TrainckptError):
            raise SystemExit(error.exit_code)

    sys.excepthook = hook
