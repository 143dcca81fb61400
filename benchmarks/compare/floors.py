"""The floors: what memory and disk take for the same bytes, with nothing else done to them.

    copy        every rank copies its state into touched memory, all at once
    copy_share  the same, but each rank only its share of the bytes that all of them have alike
    fresh_copy  as copy, into memory that was never touched
    write       O_DIRECT write of the unique bytes, each rank its share, fsync of files and folder
    read        O_DIRECT read of those files into memory that was never touched

On a GPU, copy goes to pinned memory. Where the file system refuses O_DIRECT, writes and reads are
ordinary ones (the files' caches are dropped before the reading), and that is said.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.compare.caches import evict
from benchmarks.compare.together import slowest, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.compare.training import Training

BLOCK = 16 << 20  # bytes of one write or read
AREA = 1 << 30  # bytes of memory that a copy uses at a time, far more than caches hold
PAGE = 4096  # what O_DIRECT is aligned to
FILES = 4  # written and read at once by all ranks together


class Floors:
    """Measures the floors of one training. Between two measurements it holds no memory."""

    def __init__(self, training: Training, folder: Path) -> None:
        rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._num_bytes, self._folder = training.num_bytes, folder
        self._share = self._num_bytes // self._ranks
        self._first = self._share * rank
        files = max(1, FILES // self._ranks)
        self._files = [folder / f"floor{rank}.{number}" for number in range(files)]
        self._file_bytes = -(-self._share // files // PAGE) * PAGE
        self._direct = os.O_DIRECT

    def measure(self, training: Training) -> dict[str, float]:
        """Seconds of each floor, of the slowest rank."""
        end = self._first + self._share
        self._memory, self._touched = self._touch(training)
        found = {
            "floor_copy_s": timed(lambda: self._copy(training, 0, self._num_bytes)),
            "floor_copy_share_s": timed(lambda: self._copy(training, self._first, end)),
            "floor_fresh_copy_s": self._fresh_copy(training),
            "floor_write_s": timed(self._write),
            "floor_read_s": self._read(),
        }
        del self._memory, self._touched
        if training.device != "cpu":
            empty_host_cache()
        return found

    def _touch(self, training: Training) -> tuple[mmap.mmap, torch.Tensor]:
        """Memory that was touched: to write from, and to copy to."""
        size = -(-min(self._num_bytes, AREA) // BLOCK) * BLOCK
        memory = mmap.mmap(-1, size)  # page-aligned, as O_DIRECT wants it
        for _ in range(size // BLOCK):
            memory.write(os.urandom(PAGE) * (BLOCK // PAGE))
        touched = torch.frombuffer(memory, dtype=torch.uint8)
        return memory, touched if training.device == "cpu" else touched.pin_memory()

    def _copy(self, training: Training, first: int, end: int) -> None:
        for start in range(first, end, self._touched.numel()):
            stop = min(start + self._touched.numel(), end)
            copy(training, start, stop, self._touched)
        training.wait_for_device()

    def _fresh_copy(self, training: Training) -> float:
        """An area at a time, so that the whole need not fit; unmapping is not timed."""
        seconds = 0.0
        dist.barrier()
        for first in range(0, self._num_bytes, AREA):
            end, begun = min(first + AREA, self._num_bytes), time.perf_counter()
            fresh = torch.frombuffer(mmap.mmap(-1, end - first), dtype=torch.uint8)
            copy(training, first, end, fresh)
            training.wait_for_device()
            seconds += time.perf_counter() - begun
            del fresh
        return slowest(seconds)

    # ---- disk

    def _write(self) -> None:
        in_threads(self._write_file, self._files)
        descriptor = os.open(self._folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def _write_file(self, path: Path) -> None:
        file = self._open(path, os.O_WRONLY | os.O_CREAT)
        memory, size = memoryview(self._memory), len(self._memory)
        for first in range(0, self._file_bytes, BLOCK):
            at, num_bytes = first % size, min(BLOCK, self._file_bytes - first)
            os.pwrite(file, memory[at : at + num_bytes], first)
        os.fsync(file)
        os.close(file)

    def _read(self) -> float:
        for path in self._files:
            evict(path)
        seconds = timed(lambda: in_threads(self._read_file, self._files))
        for path in self._files:
            path.unlink()
        return seconds

    def _read_file(self, path: Path) -> None:
        file = self._open(path, os.O_RDONLY)
        fresh = memoryview(mmap.mmap(-1, self._file_bytes))
        for first in range(0, self._file_bytes, BLOCK):
            os.preadv(file, [fresh[first : first + BLOCK]], first)
        os.close(file)

    def _open(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags | self._direct, 0o600)
        except OSError:
            print(f"no O_DIRECT in {path.parent}: the floors are ordinary I/O", file=sys.stderr)
            self._direct = 0
            return os.open(path, flags, 0o600)


def empty_host_cache() -> None:
    """Free the pinned memory that torch keeps for later."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:  # torch 2.11 and before
        torch._C._host_emptyCache()


def pieces(training: Training, first: int, end: int) -> Iterator[torch.Tensor]:
    """Bytes [first, end) of the state, as flat views of its tensors."""
    at = 0
    for tensor in training.tensors():
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        piece = flat[max(0, first - at) : max(0, end - at)]
        if piece.numel():
            yield piece
        at += flat.numel()


def copy(training: Training, first: int, end: int, target: torch.Tensor) -> None:
    """Bytes [first, end) of the state to the beginning of `target`, by as many threads as train."""
    share = -(-(end - first) // torch.get_num_threads())
    in_threads(
        lambda start: copy_alone(training, start, min(start + share, end), target[start - first :]),
        list(range(first, end, share)),
    )


def copy_alone(training: Training, first: int, end: int, target: torch.Tensor) -> None:
    """One thread's part of `copy`; NumPy's copy is a single thread's, and lets others run."""
    at = 0
    for piece in pieces(training, first, end):
        into = target[at : at + piece.numel()]
        if piece.device.type == "cpu":
            np.copyto(into.numpy(), piece.numpy())
        else:
            into.copy_(piece, non_blocking=True)
        at += piece.numel()


def in_threads(act: Callable[[Any], None], items: list[Any]) -> None:
    """`act` on every item at once."""
    if len(items) == 1:
        act(items[0])
        return
    threads = [threading.Thread(target=act, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
