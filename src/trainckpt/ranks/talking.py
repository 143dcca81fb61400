"""Threads that talk to other ranks, or free tensors, and the end of the interpreter.

They make calls into torch. One that comes back from such a call while the interpreter ends is
ended by it in a place where C++ allows no end: the process is aborted (134), however well the run
went. So at exit they are waited for, a little: whoever owns them has told them to end by then.

gloo's own threads never end, but each lets go of the tensors of a collective some time after that
is over, and needs the interpreter for it (pytorch/pytorch#179291). They are given that time.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

AT_EXIT_S = 10.0  # for all of them: where cores are few they come back late
GLOO = b"(pt_gloo_runloop)"  # as torch names the threads of each group of gloo
LOOK_S = 0.005  # as long as a thread waits for the interpreter's lock before it asks for it again
ALL_AT_REST = 2  # looks one after the other

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
    _wait_for_gloo(until)


def _wait_for_gloo(until: float) -> None:
    """Until its threads wait for work; returns at once where there are none."""
    states, looks = _states_of_gloo(), 0
    while states and looks < ALL_AT_REST and time.monotonic() < until:
        time.sleep(LOOK_S)  # without the interpreter's lock
        states = _states_of_gloo()
        looks = looks + 1 if states == {b"S"} else 0


def _states_of_gloo() -> set[bytes]:
    """Of its threads, as in proc_pid_stat(5): S sleeps, R has work, or waits for a core."""
    found = set()
    with contextlib.suppress(OSError):  # there may be no /proc
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # ended meanwhile
                stat = (task / "stat").read_bytes()
                if GLOO in stat:
                    found.add(stat.rpartition(b")")[2].split()[0])
    return found


atexit.register(_wait)  # early, so it runs late: after those who end them
