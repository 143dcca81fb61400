"""Run background threads: wake one from another, and join those in torch before the exit.

`SelfPipe` lets one thread sleep on a descriptor that any other can make readable.

`thread` starts threads that talk to other ranks or free tensors. If one returns from a
torch call while the interpreter ends, the interpreter ends it in a place where C++ allows no end:
the process is aborted (134), however well the run went. So the exit waits for them, a little: their
owners have told them to end by then.

gloo's own threads never end, but each frees the tensors of a collective some time after that is
over, and needs the interpreter for it (pytorch/pytorch#179291). The exit gives them that time.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class SelfPipe:
    """A pair of nonblocking sockets. Calls after `close` do nothing."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Readable after `ring`, until `drain`."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Make the descriptor readable. Any thread."""
        with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Make it unreadable again. The sleeping thread."""
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Close the sockets, once no thread sleeps on them."""
        self._reader.close()
        self._writer.close()


AT_EXIT_S = 10.0  # for all of them: where cores are few they come back late
GLOO = b"(pt_gloo_runloop)"  # as torch names the threads of each group of gloo
LOOK_S = 0.005  # as long as a thread waits for the interpreter's lock before it asks for it again
ALL_AT_REST = 2  # consecutive polls

_talking: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def thread(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Return an unstarted daemon thread that calls torch's stores or groups, or drops tensors."""
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
    """Wait until gloo's threads are idle; returns at once if there are none."""
    states, looks = _states_of_gloo(), 0
    while states and looks < ALL_AT_REST and time.monotonic() < until:
        time.sleep(LOOK_S)  # without the interpreter's lock
        states = _states_of_gloo()
        looks = looks + 1 if states == {b"S"} else 0


def _states_of_gloo() -> set[bytes]:
    """Return the states of gloo's threads, as in proc_pid_stat(5): S sleeps, R runs or waits for
    a core."""
    found = set()
    with contextlib.suppress(OSError):  # there may be no /proc
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # ended meanwhile
                stat = (task / "stat").read_bytes()
                if GLOO in stat:
                    found.add(stat.rpartition(b")")[2].split()[0])
    return found


atexit.register(_wait)  # registered early, so it runs late: after the owners' hooks
