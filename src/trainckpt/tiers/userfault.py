"""userfaultfd: memory of a process whose missing pages it makes itself, with content in them.

Linux lets a process that handles its own faults (userfaultfd, UFFDIO_COPY, which its manual pages
describe) have pages made with what is to stand there. Who uses it gives memory into its charge for
a while, in which nobody may touch what is not there yet.

    filling     around many uses: the descriptor is opened once
    charge      give memory into its charge; `discharge` takes it back
    make_pages  with content, in memory that is in its charge

One descriptor is open while anybody uses it, and no longer: no dump could hold it, and in a forked
process it would still stand for its parent's memory. Another process of this user may borrow it
(`pidfd_getfd`), to make pages here; what is in no charge it cannot make, nor change what is there.

The same service marks pages until they are next written to (`watcher`, `mark`), since Linux 6.7
without anybody having to handle that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
import threading
from typing import TYPE_CHECKING

from trainckpt.tiers.direct import libc

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_CALLS = {"x86_64": 323, "aarch64": 282}  # numbers of userfaultfd
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0) | 1  # UFFD_USER_MODE_ONLY: needs no privilege
_VERSION = 0xAA
_SIGBUS = 1 << 7  # UFFD_FEATURE_SIGBUS: whoever touched it all the same would end, not wait forever
_WP_ASYNC = 1 << 15  # UFFD_FEATURE_WP_ASYNC: who writes takes the mark off, and goes on
_MISSING, _WP = 1, 2  # UFFDIO_REGISTER_MODE_MISSING and _WP
_MARK = 1  # UFFDIO_WRITEPROTECT_MODE_WP
_PIDFD_GETFD = 438  # the number of that call, on all machines alike


class _Api(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("api", "features", "ioctls"))


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Register(ctypes.Structure):
    _fields_ = (("range", _Range), ("mode", ctypes.c_uint64), ("ioctls", ctypes.c_uint64))


class _Mark(ctypes.Structure):
    _fields_ = (("range", _Range), ("mode", ctypes.c_uint64))


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
_WRITEPROTECT = _request(0x06, ctypes.sizeof(_Mark))


@functools.cache
def is_available() -> bool:
    """Whether this system makes pages with content."""
    with _service:
        return _service.descriptor is not None


def descriptor() -> int | None:
    """Open while anybody is inside `filling`; None where the system refuses."""
    return _service.descriptor


def charge(descriptor: int, where: int, num_bytes: int) -> bool:
    """Give whole pages of this process into the charge of its descriptor; whether that was done."""
    if _ask(descriptor, _REGISTER, _Register(_Range(where, num_bytes), _MISSING, 0)) == 0:
        return True
    _ask(descriptor, _UNREGISTER, _Range(where, num_bytes))  # some of it may have been
    return False


def discharge(descriptor: int, where: int, num_bytes: int) -> bool:
    """Take them back; False: the system keeps them, and nobody may touch what is not there."""
    return _ask(descriptor, _UNREGISTER, _Range(where, num_bytes)) == 0


def mark(descriptor: int, where: int, num_bytes: int) -> bool:
    """Mark whole pages of this process until each is next written to, by a `watcher`'s descriptor.

    `discharge` takes the marks off. False: not all of them could be marked.
    """
    begun = _Register(_Range(where, num_bytes), _WP, 0)
    if _ask(descriptor, _REGISTER, begun) == 0:
        if _ask(descriptor, _WRITEPROTECT, _Mark(_Range(where, num_bytes), _MARK)) == 0:
            return True
        _ask(descriptor, _UNREGISTER, _Range(where, num_bytes))
    return False


def make_pages(descriptor: int, where: int, source: int, num_bytes: int) -> int:
    """Make pages at `where` in the descriptor's process, of what lies at `source` in this one.

    Returns:
        How many bytes, from the first on: fewer where one is there already, or is in no charge.
    """
    done = 0
    while done < num_bytes:
        made = _Copy(where + done, source + done, num_bytes - done, 0, 0)
        if _ask(descriptor, _COPY, made) == 0:
            done = num_bytes
        elif made.copied > 0:  # interrupted
            done += made.copied
        else:
            break
    return done


class _Service:
    """The system's, while anybody uses it: no dump could hold it, and no forked process may.

    Attributes:
        descriptor: This process's.
    """

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._others: set[int] = set()  # borrowed, or for marks
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

    def borrow(self, handle: int, descriptor: int) -> int:
        """`handle`: of the other process."""
        call, flags = ctypes.c_long(_PIDFD_GETFD), ctypes.c_uint(0)
        with self._lock:  # nobody forks before it is known
            wanted = ctypes.c_int(handle), ctypes.c_int(descriptor)
            found = int(libc().syscall(call, *wanted, flags))
            if found < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"descriptor {descriptor}: {os.strerror(number)}")
            is_one = False
            try:  # whatever has its number by now is none of ours
                is_one = "userfaultfd" in os.readlink(f"/proc/self/fd/{found}")  # noqa: PTH115
            finally:
                if not is_one:
                    os.close(found)
            if not is_one:
                raise OSError(f"descriptor {descriptor} is another one")
            self._others.add(found)
            return found

    def watcher(self) -> int | None:
        """Another one of this process's."""
        with self._lock:
            found = _open(_WP_ASYNC)
            if found is not None:
                self._others.add(found)
            return found

    def give_back(self, descriptor: int) -> None:
        """Close what was borrowed, or a watcher."""
        with self._lock:
            self._others.discard(descriptor)
            os.close(descriptor)

    def before_fork(self) -> None:
        """A child knows of all descriptors that it gets."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """In the parent."""
        self._lock.release()

    def forked(self) -> None:
        """In a child, where it would still be the parent's memory that is filled."""
        self._close()
        for other in self._others:
            with contextlib.suppress(OSError):
                os.close(other)
        self._others.clear()
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
    """Inside, the system need not be asked for its service each time; on any thread."""
    return _service


def borrow(process: int, descriptor: int) -> int:
    """Another process's descriptor as one of this process, to make pages there.

    Raises:
        OSError: there is no such process or descriptor, or it is forbidden.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError("this system does not let processes share descriptors")
    handle = os.pidfd_open(process)
    try:
        return _service.borrow(handle, descriptor)
    finally:
        os.close(handle)


def watcher() -> int | None:
    """A descriptor to `mark` pages with; None where the system has no such marks."""
    return _service.watcher()


def give_back(descriptor: int) -> None:
    """Close what was borrowed, or a watcher: what it had marked is marked no more."""
    _service.give_back(descriptor)


def _open(features: int = _SIGBUS) -> int | None:
    number = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return None
    descriptor = int(libc().syscall(ctypes.c_long(number), ctypes.c_int(_FLAGS)))
    if descriptor < 0:
        return None
    if _ask(descriptor, _API, _Api(_VERSION, features, 0)):
        os.close(descriptor)
        return None
    return descriptor


def _ask(descriptor: int, request: ctypes.c_ulong, about: ctypes.Structure) -> int:
    return int(libc().ioctl(ctypes.c_int(descriptor), request, ctypes.byref(about)))
