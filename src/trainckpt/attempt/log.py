"""Log to `trainckpt`, by default on stderr, and end uncaught errors with their exit code.

Python ends with 1 after any uncaught exception, and schedulers act on the code. The traceback is
printed as ever. A SystemExit that leaves `sys.excepthook` ends the interpreter in order with its
code: functions registered with `atexit` run.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError

if TYPE_CHECKING:
    from types import TracebackType


logger = logging.getLogger("trainckpt")


def prepare() -> None:
    """Make INFO lines visible where the script has configured no logging, and install the
    excepthook.

    With the excepthook, an uncaught error of trainckpt ends the process with its own exit code.
    """
    install()
    if logger.hasHandlers() or logger.level:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("trainckpt: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


_installed: list[bool] = []


def exit_code_of(error: SystemExit) -> int:
    """Return the exit code as the parent process sees it: one byte, as Python makes it."""
    code = error.code
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1  # it is printed
    return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF


def install() -> None:
    """Install the hook, once a process."""
    if _installed:
        return
    _installed.append(True)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, TrainckptError):
            raise SystemExit(error.exit_code)

    sys.excepthook = hook
