"""Threads that talk to other ranks, or free tensors, and the end of the interpreter.

They make calls into torch. One that comes back from such a call while the interpreter ends is
ended by it in a place where C++ allows no end: the process is aborted (134), however well the run
went. So at exit they are waited for, a little: whoever owns them has told them to end by then.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

AT_EXIT_S = 10.0  # for all of them: where cores are few they come back late

_talking: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def thread(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """A daemon thread, not started yet, that calls torch's stores or groups, or drops tensors."""
    made = threading.Thread(target=target, name=name, args=args, daemon=True)
    _talking.add(made)
    return made


def _wait() -> None:
    until = time.monotonic() + AT_EXIT_S
    for each in list(_talking):
        if each.is_alive() and each is not threading.current_thread():
            each.join(max(0.0, until - time.monotonic()))


atexit.register(_wait)  # early, so it runs late: after those who end them
