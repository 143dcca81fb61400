"""Past the cache: copies of what is large, to memory that is there and nobody reads soon.

A processor that stores to memory first fetches it into its cache, a third of all that a copy moves.
It has stores that do without ("non-temporal"). The C library uses them for copies of more than
about the last cache; virtual machines show one of their host's, of 480 MB, and never come to it.
StringZilla's `sz_copy` uses them from 1 MB on where there is AVX-512, and ends with a fence, so
that whoever hears of the copy finds it made; elsewhere it does not, and is not used. Measured,
640 MB to memory that was touched: 0.061 s, 0.098 with the C library's copy, 0.103 with torch's; by
two threads 0.035 in place of 0.052. To memory that was not touched it takes a third longer: there
the system has just cleared each page in the cache.

The extension module is not imported, but opened as the library that it is too: its functions for
Python make no copies. They are tried before they are used, and where there are none all is copied
as ever.

Floor 0. Uses: tiers.direct, tiers.fresh_memory. Used by: state, lifecycle.run.machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.tiers.direct import PAGE_BYTES, address, memory
from trainckpt.tiers.fresh_memory import is_made

if TYPE_CHECKING:
    from collections.abc import Callable

    Copy = Callable[[int, int, int], object]

FROM_BYTES = 1 << 20  # from which on `sz_copy` goes past the cache
_LIBRARY, _FUNCTION = "stringzilla", "sz_copy"
_CPUINFO = Path("/proc/cpuinfo")
_NEEDED = {"avx512f", "avx512bw", "avx512vl"}  # for its copy that goes past the cache
_TRIED_BYTES = FROM_BYTES + 1000


class _Functions(NamedTuple):
    """To where, from where, how many bytes."""

    copy: Copy  # without the interpreter's lock
    copy_holding: Copy  # keeps it


def pays(target: int, num_bytes: int) -> bool:
    """Whether so much is copied past the cache here, and sooner than otherwise."""
    if num_bytes < FROM_BYTES or functions() is None:
        return False
    return is_made(-(-target // PAGE_BYTES) * PAGE_BYTES) is True


def copy(target: int, source: int, num_bytes: int) -> None:
    """Copy between two addresses, past the cache if that pays, while other threads run.

    What is copied does not overlap.
    """
    found = functions() if pays(target, num_bytes) else None
    (ctypes.memmove if found is None else found.copy)(target, source, num_bytes)


def copy_holding(target: int, source: int, num_bytes: int) -> None:
    """As `copy` where it pays; no other thread has the interpreter meanwhile.

    For who wants it at once again.
    """
    found = functions()
    (ctypes.memmove if found is None else found.copy_holding)(target, source, num_bytes)


def is_for_this_machine() -> bool:
    """Whether the processor is one on which the library's copy goes past the cache."""
    with contextlib.suppress(OSError):
        with _CPUINFO.open(errors="replace") as file:  # of the first core: many take a while
            flags = next((line for line in file if line.startswith("flags")), "")
        return set(flags.split()) >= _NEEDED
    return False


@functools.lru_cache(maxsize=1)
def functions() -> _Functions | None:
    """What copies past the cache, tried; None: nothing does."""
    if not is_for_this_machine():
        return None
    try:
        spec = importlib.util.find_spec(_LIBRARY)
        path = spec.origin if spec is not None else None
        if path is None:
            return None
        found = [getattr(kind(path), _FUNCTION) for kind in (ctypes.CDLL, ctypes.PyDLL)]
    except (OSError, AttributeError, ImportError, ValueError):
        return None
    for each in found:
        each.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        each.restype = None
    return _Functions(*found) if all(map(_copies, found)) else None


def _copies(function: Copy) -> bool:
    """Whether it copies what it is told, and writes nothing around it."""
    source, target = memory(_TRIED_BYTES), memory(_TRIED_BYTES)
    source[:] = (bytes(range(1, 252)) * (_TRIED_BYTES // 251 + 1))[:_TRIED_BYTES]
    begin, end = 3, _TRIED_BYTES - 5
    into, of = address(target), address(source)
    if into is None or of is None:
        return False
    function(into + begin, of + begin, end - begin)
    untouched = not any(target[:begin]) and not any(target[end:])
    return untouched and target[begin:end] == source[begin:end]
