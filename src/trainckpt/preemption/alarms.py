"""Exceptions that a signal handler of the script's has raised.

A handler runs wherever the main thread happens to be, so its exception (a TimeoutError of an
alarm, say) may come out of a call of ours. It is not a failure of that call, and belongs to the
script. One that is no `Exception`, such as KeyboardInterrupt, passes by itself.

Floor 1. Uses: nothing of ours. Used by: lifecycle.
"""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType


def raised_by_handler(error: BaseException) -> BaseException | None:
    """`error`, or what it was raised from, if a signal handler in force raised that."""
    codes = {_code(signal.getsignal(signum)) for signum in signal.valid_signals()} - {None}
    seen: BaseException | None = error
    while seen is not None:
        frame = seen.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code in codes:
                return seen
            frame = frame.tb_next
        seen = seen.__cause__
    return None


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004 - the class's own
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None)
