"""Fresh memory of this process, filled with content as its pages are made.

Whoever writes to memory that nobody has touched waits for each page: the system interrupts the
writer, clears the page, and only then is it written to. Linux can make pages with the content in
them instead, many at a time (userfaultfd, UFFDIO_COPY, which its manual pages describe): measured,
0.21 s per GB in place of 0.37. It serves processes that handle their own faults, so memory is
given into its charge for the time of one copy only, and nobody else may touch it meanwhile.

    is_fresh    whether that can be done with this process's own memory, and pays
    fill        copy to it; to any other memory too
    make        the same of memory that is known to be fresh, and may be mapped by others too
    filling     around many of those: the system is asked for its service once

Where the system refuses (a container may forbid the call), and for pages that are there already,
it is a copy like any other.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.tiers.direct import PAGE_BYTES, address, copy, libc
from trainckpt.tiers.large_pages import large_pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

FROM_BYTES = 64 << 10  # what is less is written sooner than asked for
_CALLS = {"x86_64": 323, "aarch64": 282}  # numbers of userfaultfd
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0) | 1  # UFFD_USER_MODE_ONLY: needs no privilege
_VERSION = 0xAA
_SIGBUS = 1 << 7  # UFFD_FEATURE_SIGBUS: whoever touched it all the same would end, not wait forever
_MISSING = 1  # UFFDIO_REGISTER_MODE_MISSING


class _Api(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("api", "features", "ioctls"))


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Register(ctypes.Structure):
    _fields_ = (("range", _Range), ("mode", ctypes.c_uint64), ("ioctls", ctypes.c_uint64))


class _Copy(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("into", "data", "length", "mode")),
        ("copied", ctypes.c_int64),
    )


def _request(number: int, size: int, *, returns: bool = True) -> ctypes.c_ulong:
    """An ioctl's number, as `_IOWR` and `_IOR` make it."""
    return ctypes.c_ulong((3 if returns else 2) << 30 | size << 16 | _VERSION << 8 | number)


_API = _request(0x3F, ctypes.sizeof(_Api))
_REGISTER = _request(0x00, ctypes.sizeof(_Register))
_UNREGISTER = _request(0x01, ctypes.sizeof(_Range), returns=False)
_COPY = _request(0x03, ctypes.sizeof(_Copy))


@functools.cache
def is_available() -> bool:
    """Whether this system makes pages with content."""
    with _service:
        return _service.descriptor is not None


def is_fresh(block: memoryview) -> bool:
    """Whether nobody has touched the first page of this memory, and `fill` will make pages."""
    begin, end = _pages(address(block) or 0, len(block))
    if end - begin < FROM_BYTES or not is_available() or large_pages().come_by_themselves:
        return False
    found = (ctypes.c_ubyte * 1)()
    size = ctypes.c_size_t(PAGE_BYTES)
    asked = libc().mincore(ctypes.c_void_p(begin), size, found)
    return bool(asked == 0 and not found[0] & 1)


def fill(into: memoryview, data: memoryview) -> None:
    """`into[:] = data`, of as many bytes, while other threads run.

    Args:
        into: Nobody else touches it meanwhile.
        data: Best still in a cache.

    Raises:
        UnusableSnapshot: the system keeps memory in that charge, so nobody may touch it.
    """
    if len(into) == len(data) and is_fresh(into):
        make(into, data, copy)
    else:
        copy(into, data)


def make(
    into: memoryview, data: memoryview, rest: Callable[[memoryview, memoryview], None]
) -> None:
    """As `fill`; what is no whole page, or was not made, `rest` writes."""
    where = address(into) or 0
    begin, end = _pages(where, len(into))
    source = address(data) if end - begin >= FROM_BYTES and is_available() else None
    if source is None:
        rest(into, data)
        return
    done = begin - where + _make(begin, source + begin - where, end - begin)
    rest(into[: begin - where], data[: begin - where])
    rest(into[done:], data[done:])


def _pages(where: int, num_bytes: int) -> tuple[int, int]:
    """The whole pages in so many bytes: the first one's address, and the end of the last."""
    begin = -(-where // PAGE_BYTES) * PAGE_BYTES
    return begin, max(begin, (where + num_bytes) // PAGE_BYTES * PAGE_BYTES)


def _make(where: int, source: int, num_bytes: int) -> int:
    """Make pages of what lies at `source`; how many bytes, fewer where one is there already."""
    with filling():
        descriptor = _service.descriptor
        charge = _Register(_Range(where, num_bytes), _MISSING, 0)
        if descriptor is None or _ask(descriptor, _REGISTER, charge):
            return 0
        done = 0
        try:
            while done < num_bytes:
                made = _Copy(where + done, source + done, num_bytes - done, 0, 0)
                if _ask(descriptor, _COPY, made) == 0:
                    done = num_bytes
                elif made.copied > 0:  # interrupted
                    done += made.copied
                else:
                    break
        finally:
            is_kept = _ask(descriptor, _UNREGISTER, charge.range) != 0
        if is_kept and done < num_bytes:
            raise UnusableSnapshot(f"{num_bytes} bytes of memory cannot be filled")
        return done


class _Service:
    """The system's, while anybody uses it: no dump could hold it, and no forked process may."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._users, self._lock = 0, threading.RLock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self.descriptor = _open()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users = max(self._users - 1, 0)  # a forked process begins with none
            if not self._users:
                self._close()

    def before_fork(self) -> None:
        """A child knows of all descriptors that it gets."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """In the parent."""
        self._lock.release()

    def forked(self) -> None:
        """In a child, where it would still be the parent's memory that is filled."""
        self._close()
        self._users, self._lock = 0, threading.RLock()

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_service = _Service()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_service.before_fork,
        after_in_parent=_service.after_fork,
        after_in_child=_service.forked,
    )


def filling() -> AbstractContextManager[None]:
    """Inside, `fill` need not ask for the system's service each time; on any thread."""
    return _service


def _open() -> int | None:
    number = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return None
    descriptor = int(libc().syscall(ctypes.c_long(number), ctypes.c_int(_FLAGS)))
    if descriptor < 0:
        return None
    if _ask(descriptor, _API, _Api(_VERSION, _SIGBUS, 0)):
        os.close(descriptor)
        return None
    return descriptor


def _ask(descriptor: int, request: ctypes.c_ulong, about: ctypes.Structure) -> int:
    return int(libc().ioctl(ctypes.c_int(descriptor), request, ctypes.byref(about)))
