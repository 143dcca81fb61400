"""Measure the speed of a run directory or store: write a small probe once and read it back.

What is written for that is removed again. A directory that does not exist yet is not made: its
nearest parent is tried.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.cli import output
from trainckpt.errors import TrainckptError
from trainckpt.storage import fs_probe
from trainckpt.storage.timeouts import answer_within

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.storage.fs_probe import Capabilities
    from trainckpt.storage.local import LocalTier
    from trainckpt.storage.object_store import ObjectStoreTier

PROBE_BYTES = 64 << 20
STORE_PROBE_BYTES = 16 << 20


@dataclass(frozen=True)
class Speed:
    """Measured speed of one process.

    Attributes:
        num_bytes: Of the probe.
        write_s, read_s: How long it took to write it so that it stays, and to read it; 0: there was
            no room to try.
    """

    num_bytes: int
    write_s: float = 0.0
    read_s: float = 0.0

    @property
    def known(self) -> bool:
        """True if it was measured."""
        return self.write_s > 0

    def in_words(self) -> str:
        """For people."""
        if not self.known:
            return "no room to measure it"
        seconds = (self.write_s, max(self.read_s, 1e-9))
        write, read = (output.size(int(self.num_bytes / duration_s)) for duration_s in seconds)
        return f"writes {write}/s and reads {read}/s ({output.size(self.num_bytes)}, one process)"


def try_directory(tier: LocalTier) -> tuple[Path, tuple[Capabilities, Speed]]:
    """The folder that was tried, what its file system can do, and how fast it is.

    Raises:
        OSError: it cannot be used.
        TierUnavailable: it does not answer.
    """
    folder = answer_within(tier.url, lambda: _nearest(tier.root))
    scratch = folder / f".tmp-doctor-{secrets.token_hex(8)}"
    return folder, answer_within(tier.url, lambda: _try(scratch))


def try_store(tier: ObjectStoreTier) -> Speed:
    """Measure the speed of an object store.

    Raises:
        TrainckptError: it cannot be used.
    """
    key = f"probe/doctor-{secrets.token_hex(8)}"
    data = memoryview(bytearray(os.urandom(1 << 20) * (STORE_PROBE_BYTES >> 20)))
    try:
        start = time.perf_counter()
        tier.write_parts(key, len(data), [(0, data)])
        write_end = time.perf_counter()
        tier.read_into(key, 0, data)
        return Speed(len(data), write_end - start, time.perf_counter() - write_end)
    finally:
        with contextlib.suppress(TrainckptError):
            tier.remove(key)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest parent that exists; `OSError` if it is no directory."""
    while True:
        try:
            next(path.iterdir(), None)
        except FileNotFoundError:
            path = path.parent
        else:
            return path


def _try(scratch: Path) -> tuple[Capabilities, Speed]:
    scratch.mkdir(mode=0o700)
    try:
        capabilities = fs_probe.measure(scratch)
        if 0 <= capabilities.free_bytes < 2 * PROBE_BYTES:
            return capabilities, Speed(PROBE_BYTES)
        return capabilities, _measure(scratch / "probe")
    finally:
        with contextlib.suppress(OSError):
            (scratch / "probe").unlink(missing_ok=True)
            scratch.rmdir()


def _measure(path: Path) -> Speed:
    """To write the probe to stable storage, and to read it back, past the page cache."""
    block = mmap.mmap(-1, 4 << 20)
    block[:] = os.urandom(1 << 20) * 4
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(PROBE_BYTES // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        write_end = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        while os.read(descriptor, len(block)):
            pass
        return Speed(PROBE_BYTES, write_end - start, time.perf_counter() - write_end)
    finally:
        os.close(descriptor)
