"""How a disk's queue ranks this process's requests (Linux's ioprio_set, see its manual page).

Where the queue's scheduler knows priorities (mq-deadline, BFQ), what is idle is read when nobody
else asks for anything. Others do not look at it, which harms nothing.

Floor 0. Uses: tiers.direct. Used by: supervisor.prefetch.
"""

from __future__ import annotations

import ctypes
import platform
import sys

from trainckpt.tiers.direct import libc

_CALLS = {"x86_64": (251, 252), "aarch64": (30, 31)}  # numbers of ioprio_set, ioprio_get
_OF_A_PROCESS, _OF_A_GROUP = 1, 2
_CLASS_SHIFT, _AS_ALL_OTHERS, _IDLE = 13, 0, 3


def give_way_to_all() -> bool:
    """From now on all of this process group's requests are idle; whether the system took it."""
    return _set(_IDLE)


def give_way_to_nobody() -> bool:
    """Undo that."""
    return _set(_AS_ALL_OTHERS)


def is_idle() -> bool:
    """Whether requests of this thread are."""
    return _call(1, _OF_A_PROCESS, 0) >> _CLASS_SHIFT == _IDLE


def _set(kind: int) -> bool:
    return _call(0, _OF_A_GROUP, 0, kind << _CLASS_SHIFT) == 0


def _call(which: int, *arguments: int) -> int:
    numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return -1
    return int(libc().syscall(ctypes.c_long(numbers[which]), *(ctypes.c_int(a) for a in arguments)))
