"""Memory is made for what is read later, and for nothing else."""

from __future__ import annotations

import threading

import pytest
import torch

from trainckpt.state import warm
from trainckpt.state.warm import WarmMemory

SIZES = {"a": 1 << 20, "b": 2 << 20, "c": 1 << 20}


@pytest.fixture
def made(monkeypatch):
    """Lengths of what was made, one at a time: each waits until it may go on."""
    lengths, may = [], threading.Semaphore(0)

    def memory(num_bytes):
        lengths.append(num_bytes)
        may.acquire(timeout=60)
        return real(num_bytes)

    real = warm.memory
    monkeypatch.setattr(warm, "memory", memory)
    return lengths, may


def test_what_was_made_is_taken_once_and_only_for_what_has_its_length():
    memory = WarmMemory()
    memory.begin(SIZES)
    memory._thread.join()
    found = memory.take("a", (512, 512), torch.float32)
    assert found.shape == (512, 512)
    assert found.is_contiguous()
    assert memory.take("a", (512, 512), torch.float32) is None
    assert memory.take("b", (512, 512), torch.float32) is None
    memory.end()


def test_what_was_asked_for_before_its_turn_is_not_made(made):
    lengths, may = made
    memory = WarmMemory()
    memory.begin(SIZES)
    assert memory.take("b", (1 << 19,), torch.float32) is None
    may.release(3)
    memory._thread.join()
    assert lengths == [1 << 20, 1 << 20]
    assert memory.take("c", (1 << 18,), torch.float32) is not None
    memory.end()


def test_no_more_is_made_once_it_has_ended(made):
    lengths, may = made
    memory = WarmMemory()
    memory.begin(SIZES)
    memory._stop.set()
    may.release(3)
    memory.end()
    assert len(lengths) <= 1
    assert memory.take("a", (1 << 18,), torch.float32) is None
