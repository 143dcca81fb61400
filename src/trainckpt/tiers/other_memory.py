"""Memory of other processes of this user, on this machine: read where it lies, without their help.

Linux lets a process do that to another which it could debug as well (process_vm_readv). Where only
who started a process may debug it (Yama), it says that those may whom its own parent started.
Whatever forbids it, or other process numbers in a container, is an `OSError`, or other bytes than
there should be: whoever reads has to know what to expect.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.tiers.direct import address, libc

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PTRACER = 0x59616D61  # prctl: this process, and those it started, may debug the caller
_YAMA, _RELATED_ONLY = Path("/proc/sys/kernel/yama/ptrace_scope"), "1"


class Place(NamedTuple):
    """Bytes in the memory of a process."""

    process: int
    address: int
    num_bytes: int


class _Vector(ctypes.Structure):  # struct iovec
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def place_of(data: memoryview) -> Place:
    """Where others find `data`, as long as it lives; it must be writable."""
    where = address(data)
    if where is None:
        raise ValueError("this memory has no address that could be told")
    return Place(os.getpid(), where, len(data))


def read(place: Place, into: memoryview) -> None:
    """Fill `into`, of as many bytes, while other threads run.

    Raises:
        OSError: there is no such process or memory, or it is forbidden.
    """
    done, target = 0, address(into)
    if target is None or len(into) != place.num_bytes:
        raise OSError(f"{place.num_bytes} bytes do not go to memory of {len(into)}")
    if not hasattr(libc(), "process_vm_readv"):
        raise OSError("this system does not let processes read each other's memory")
    readv = libc().process_vm_readv
    readv.restype = ctypes.c_ssize_t
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    while done < place.num_bytes:
        left = place.num_bytes - done
        here, there = _Vector(target + done, left), _Vector(place.address + done, left)
        got = readv(
            ctypes.c_int(place.process), ctypes.byref(here), one, ctypes.byref(there), one, no_flags
        )
        if got <= 0:
            number = ctypes.get_errno() if got < 0 else 0
            raise OSError(number, f"process {place.process}: {os.strerror(number)}")
        done += got


@contextlib.contextmanager
def open_to_siblings() -> Iterator[None]:
    """Inside, processes that have this one's parent may read its memory, if its user's may."""
    is_asked = False
    with contextlib.suppress(OSError):
        is_asked = _YAMA.read_text().strip() == _RELATED_ONLY
    if is_asked:
        _let_debug(os.getppid())
    try:
        yield
    finally:
        if is_asked:
            _let_debug(0)


def _let_debug(process: int) -> None:
    """`process` and what it started; 0: nobody. What cannot be had shows when it is read."""
    libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(process), 0, 0, 0)
