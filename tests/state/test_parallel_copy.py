"""Copies that several threads make."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests.ranks.processes import context
from trainckpt.state.parallel_copy import PIECE_BYTES, CopyBatch

NUM_THREADS, NUM_FORKS = 4, 200  # without what is tested here, 3 of 100 fail


class Together:
    """A proof that holds for nothing, and lets all threads make their copies at the same time."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_THREADS)

    def holds(self, _: torch.Tensor) -> bool:
        self._barrier.wait()
        return False


def copy_in_a_fork(into: torch.Tensor, data: torch.Tensor) -> int:
    """Its exit status."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        copies, together = CopyBatch(), Together()
        for _ in range(NUM_THREADS):
            copies.add(into, data, together)
        copies.run(NUM_THREADS)
        code = 0
    finally:
        os._exit(code)


def copy_in_forks() -> None:
    torch.set_num_threads(1)  # makes torch's pool of threads, which a fork has to make anew
    data = torch.ones(1 << 17)
    ends = [copy_in_a_fork(torch.zeros(1 << 17), data) for _ in range(NUM_FORKS)]
    assert set(ends) == {0}


def test_threads_of_a_forked_process_copy_at_the_same_time():
    process = context.Process(target=copy_in_forks)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("num_threads", [1, NUM_THREADS])
def test_every_tensor_becomes_the_other_one_and_torch_is_told(num_threads):
    """Small, of several pieces, and in memory that nobody has touched yet."""
    pairs = []
    for numel in (3, 1 << 12, PIECE_BYTES // 2 + 5):
        made = torch.nn.Parameter(torch.ones(numel))
        pairs += [(made, torch.randn(numel)), (torch.empty(numel), torch.randn(numel))]
    before = [into._version for into, _ in pairs]
    copies = CopyBatch()
    for into, data in pairs:
        copies.add(into, data)
    copies.run(num_threads)
    for (into, data), version in zip(pairs, before, strict=True):
        assert torch.equal(into, data)
        assert into._version > version
