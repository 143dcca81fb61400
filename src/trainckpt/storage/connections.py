"""Connections to object stores, which live on the event loop of fsspec.

They are closed when the interpreter ends. A forked process closes its copies at once. A process
dump needs all of them closed, so requests are held until it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from fsspec import asyn
from fsspec.asyn import sync

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Iterable, Iterator


# ---- closed when the interpreter ends, not before
#
# Garbage-collected earlier, on any thread, they could not be closed on their event loop, and would
# log it. A forked process has no thread running this loop: waiting for it there never ends.


CLOSE_S = 1.0


def close_at_the_end(filesystem: Any, connections: Callable[[], Iterable[Any]]) -> None:
    """Keep `filesystem` until the process ends, then close its connections.

    The library's own finalizer, waiting for the loop, is removed.
    """
    for each in list(getattr(weakref.finalize, "_registry", ())):
        found = each.peek()
        if found is not None and found[0] is filesystem and found[1] is sync:
            each.detach()
    weakref.finalize(filesystem, _close, os.getpid(), filesystem, connections)


def _close(pid: int, filesystem: Any, connections: Callable[[], Iterable[Any]]) -> None:
    async def close() -> None:
        for each in connections():
            if each is not None:
                await each.close()

    if pid != os.getpid():
        loop = filesystem._loop  # the property `loop` raises in a forked process
        loop.set_exception_handler(lambda *_: None)  # no log of unclosed connections
        return
    with contextlib.suppress(Exception):
        sync(filesystem.loop, close, timeout=CLOSE_S)


# ---- none in a forked process, none in a process dump


HOLD_S, AGAIN_S = 5.0, 0.05


class _Requests:
    """Requests in progress, and whether more may begin."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num, self.are_held = 0, False


_requests = _Requests()
_at_fork: list[AbstractEventLoop] = []  # fsspec forgets its loop in a forked process


@contextlib.contextmanager
def request() -> Iterator[None]:
    """Count a request as in progress; it begins once requests are not held."""
    with _requests.changed:
        _requests.changed.wait_for(lambda: not _requests.are_held)
        _requests.num += 1
    try:
        yield
    finally:
        with _requests.changed:
            _requests.num -= 1
            _requests.changed.notify_all()


def are_held() -> bool:
    """Return True between `hold_requests` and `release_requests`."""
    return _requests.are_held


def hold_requests() -> None:
    """Hold new requests back, cut those in progress off, and close all connections.

    Raises:
        TimeoutError: A request went on, or the event loop did not answer. Requests are held.
    """
    until_s = time.monotonic() + HOLD_S
    with _requests.changed:
        _requests.are_held = True
        while _requests.num:
            if time.monotonic() >= until_s:
                raise TimeoutError(f"a request to an object store went on for {HOLD_S:.0f} s")
            _close_connections()
            _requests.changed.wait(AGAIN_S)  # a request may have been about to connect
    _close_connections()


def release_requests() -> None:
    """Let requests begin again. May be repeated."""
    with _requests.changed:
        _requests.are_held = False
        _requests.changed.notify_all()


def _close_connections() -> None:
    loop = asyn.loop[0]
    if loop is None:
        return

    async def close() -> None:
        for each in _transports(loop):
            each.abort()
        await asyncio.sleep(0)  # the loop closes their sockets first

    try:
        sync(loop, close, timeout=CLOSE_S)
    except TimeoutError:  # fsspec's has no text
        raise TimeoutError(f"connections to stores were not closed in {CLOSE_S:.0f} s") from None


def _transports(loop: AbstractEventLoop) -> list[Any]:
    return list(getattr(loop, "_transports", {}).values())  # asyncio has no public list of them


def _before_fork() -> None:
    _at_fork[:] = [loop for loop in asyn.loop if loop is not None]


def _forked() -> None:
    """Close the copies of the parent's connections, which would stay open after the parent's.

    It touches sockets alone, since the loop's selector is shared with the parent.
    """
    global _requests
    _requests = _Requests()
    for loop in _at_fork:
        for each in _transports(loop):
            if each._sock is not None:
                each._sock.close()
    _at_fork.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_forked)
