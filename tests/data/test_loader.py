"""A run interrupted at any batch equals the uninterrupted run, and that of the plain loader."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from tests.data import datasets as d

KINDS = {"no workers": (0, False), "2": (2, False), "3": (3, False), "3 kept": (3, True)}


def plain(workers=2, persistent=False, generator=False, dataset=None, start="fork", **options):
    """Return a function that makes the same DataLoader again and again."""

    def make() -> DataLoader:
        options_now = {key: make() if callable(make) else make for key, make in options.items()}
        if generator:
            options_now["generator"] = torch.Generator().manual_seed(3)
        if "sampler" not in options_now and "batch_sampler" not in options_now:
            options_now["shuffle"] = True
        if "batch_sampler" not in options_now:
            options_now.setdefault("batch_size", 4)
        return DataLoader(
            dataset or d.Augmented(),
            num_workers=workers,
            persistent_workers=persistent,
            multiprocessing_context=start if workers else None,
            **options_now,
        )

    return make


def assert_exact(make, stops, **how) -> None:
    want = d.straight(make, **how)
    for stop in stops:
        before, after = d.interrupted(make, stop, **how)
        assert before + after == want, f"stopped at boundary {stop}"


@pytest.mark.parametrize("drop_last", [False, True], ids=["", "drop_last"])
@pytest.mark.parametrize("generator", [False, True], ids=["", "generator"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_at_any_boundary_goes_on_bitwise(kind, generator, drop_last):
    """Before the first batch, in an epoch, after its last batch, between epochs, and later."""
    workers, persistent = KINDS[kind]
    batches = 5 if drop_last else 6
    per_epoch = batches + 1  # the one that finds the epoch exhausted
    make = plain(workers, persistent, generator, drop_last=drop_last)
    stops = (1, 2, per_epoch, per_epoch + 1, per_epoch + 4)
    assert_exact(make, stops if workers else range(1, 3 * per_epoch + 1))


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_other_start_methods_are_exact_too(start):
    """Taps, seeds and generators reach workers through pickle."""
    assert_exact(plain(2, True, start=start), [10], epochs=2)
