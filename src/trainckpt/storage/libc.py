"""The C library, for the calls that Python does not offer.

`no_io_uring` has a handle of its own: it runs without this package.
"""

from __future__ import annotations

import ctypes
import functools
import os

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
