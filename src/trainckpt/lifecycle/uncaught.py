"""The exit code of an error of ours that nobody caught, as the exit codes' table promises it.

Python ends with 1 after any uncaught exception, and schedulers act on the code. The traceback is
printed as ever; the code is set when everything registered with `atexit` after this module was
imported has run. What was registered before, such as waiting for child processes, is skipped:
loaders' workers leave by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError

if TYPE_CHECKING:
    from types import TracebackType

_codes: list[int] = []
_installed: list[bool] = []


def install() -> None:
    """From now on; once a process."""
    if _installed:
        return
    _installed.append(True)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, TrainckptError):
            _codes.append(error.exit_code)

    sys.excepthook = hook
    atexit.register(_leave)


def _leave() -> None:
    if not _codes:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(_codes[0])
