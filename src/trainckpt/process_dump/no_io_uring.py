"""Start a command without io_uring: `python no_io_uring.py COMMAND ARGS`.

CRIU cannot dump a process with an open io_uring, and torchrun's store opens one if it can. Under
this filter the three system calls fail as on an older kernel, and programs use epoll instead. All
processes of the command inherit the filter. Installing it without root means giving up new
privileges (sudo, fusermount); root gives them up too.

Standard library only, run by its path: the command imports nothing of trainckpt. If the filter
cannot be installed, the command runs without it, and a dump reports the open io_uring.
"""

import ctypes
import os
import platform
import struct
import sys

NO_SUCH_CALL = 38
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
# System call numbers are the same on both architectures; only the AUDIT_ARCH values differ.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SETUP, ENTER, REGISTER = 425, 426, 427
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | NO_SUCH_CALL


def program(architecture: int) -> bytes:
    """Return the filter in the kernel's classic BPF: eight bytes per instruction."""
    instructions = [
        (LOAD, 0, 0, 4),  # the architecture
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, 0),  # the call's number
        (JUMP_IF_EQUAL, 2, 0, SETUP),
        (JUMP_IF_EQUAL, 1, 0, ENTER),
        (JUMP_IF_EQUAL, 0, 1, REGISTER),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def install() -> bool:
    """Install the filter in this process and its future children; return True on success."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None or struct.calcsize("P") != 8:
        return False

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    code = program(architecture)
    buffer = ctypes.create_string_buffer(code)
    argument = Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(argument), 0, 0) == 0)


if __name__ == "__main__":
    install()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the user's own command
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")
