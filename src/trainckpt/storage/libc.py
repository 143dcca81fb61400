"""The C library, for the calls that Python does not offer.

`no_io_uring` has a handle of its own: it runs without this package.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys

_FALLOCATE = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_ARGUMENTS = {
    "fallocate": _FALLOCATE,
    "fallocate64": _FALLOCATE,
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "memcmp": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
}


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library; calls run without the interpreter's lock."""
    library = ctypes.CDLL(None if os.name == "posix" else "msvcrt", use_errno=True)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = arguments
    return library


def sync_file_system(path: os.PathLike[str]) -> None:
    """Put all that was written to the file system of `path` on stable storage.

    For names in a folder that this user may not open.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        syncfs = getattr(libc(), "syncfs", None)
        if syncfs is None:
            os.sync()
        elif syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(path))
    finally:
        os.close(descriptor)


# ---- disk priority (Linux's ioprio_set)
#
# Schedulers with priorities (mq-deadline, BFQ) serve idle requests only when there are no others.
# Other schedulers ignore the setting, without harm. The prefetching process calls this.


_CALLS = {"x86_64": (251, 252), "aarch64": (30, 31)}  # numbers of ioprio_set, ioprio_get
_OF_A_PROCESS, _OF_A_GROUP = 1, 2
_CLASS_SHIFT, _AS_ALL_OTHERS, _IDLE = 13, 0, 3


def set_idle_io_priority() -> bool:
    """Make this process group's requests idle from now on; return True if the system agreed."""
    return _set(_IDLE)


def reset_io_priority() -> bool:
    """Undo `set_idle_io_priority`."""
    return _set(_AS_ALL_OTHERS)


def is_idle() -> bool:
    """Return True if this thread's requests are idle."""
    return _call(1, _OF_A_PROCESS, 0) >> _CLASS_SHIFT == _IDLE


def _set(kind: int) -> bool:
    return _call(0, _OF_A_GROUP, 0, kind << _CLASS_SHIFT) == 0


def _call(which: int, *arguments: int) -> int:
    numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return -1
    return int(libc().syscall(ctypes.c_long(numbers[which]), *(ctypes.c_int(a) for a in arguments)))
