"""Another process whose memory is read; and whether this system lets a process do that."""

from __future__ import annotations

import contextlib
import errno
import functools
import secrets
import subprocess
import sys

import pytest

from trainckpt.tiers import other_memory
from trainckpt.tiers.other_memory import Place

SIZE = 3 << 20
HOLDER = f"""
import sys
from trainckpt.tiers import other_memory
data = bytearray(bytes.fromhex(sys.stdin.readline()) * {SIZE // 32})
with other_memory.open_to_siblings():
    print(*other_memory.place_of(memoryview(data)), flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holder():
    """Another process: what it holds, where, and its handle."""
    content = secrets.token_bytes(32)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write(content.hex() + "\n")
        process.stdin.flush()
        place = Place(*map(int, process.stdout.readline().split()))
        yield content * (SIZE // 32), place, process
        process.kill()


@functools.cache
def _are_readable():
    with holder() as (_, place, _):
        try:
            other_memory.read(place, memoryview(bytearray(SIZE)))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS, None):
                raise
            return False
        return True


def must_be_readable():
    """Skip the test where processes may not read each other's memory."""
    if not _are_readable():
        pytest.skip("this system lets no process read another's memory (seccomp, or ptrace_scope)")
