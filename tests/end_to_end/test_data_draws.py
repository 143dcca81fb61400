"""What a script draws from its own data between a resume and the next pass is undone."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.end_to_end.training import BATCH, Crash, Parts
from trainckpt import Checkpointer

EVEN = 8  # items: an epoch ends where a window does


class Augmented(TensorDataset):
    """Draws for each sample from a generator of its own."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.rng = random.Random(7)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.rng.random(), y


class AugmentedParts(Parts):
    def __init__(self, workers):
        super().__init__()
        data = Augmented(torch.randn(EVEN, 4), torch.arange(EVEN))
        self.loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers)


def train(place, parts, looks=False, crashes=False):
    """Two epochs; if it is to, the script fails between them. Returns what was trained."""
    lines, saves = [], []
    with Checkpointer(place, **parts.tracked(), every="never") as ckpt:
        if looks:
            parts.loader.dataset[0]
        for _ in ckpt.epochs(2):
            for batch in ckpt.batches():
                lines.append(parts.train_on(batch, ckpt.cursor.micro == 1))
                if crashes and len(lines) == EVEN // BATCH:
                    saves.append(ckpt.save())
            for save in saves:
                save.wait()
                raise Crash
    return lines


@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_that_looks_at_a_sample_after_a_resume_goes_on_bitwise(tmp_path, workers):
    straight = AugmentedParts(workers)
    lines = train(tmp_path / "straight", straight)
    with pytest.raises(Crash):
        train(tmp_path / "run", AugmentedParts(workers), crashes=True)
    resumed = AugmentedParts(workers)
    rest = train(tmp_path / "run", resumed, looks=True)
    assert lines[EVEN // BATCH :] == rest
    assert resumed.state() == straight.state()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    "stop", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(5, marks=pytest.mark.long)]
)
def test_the_bytes_of_the_random_generator_are_the_same_before_each_micro_batch(
    tmp_path, workers, stop
):
    """Megatron-Bridge#5257: one draw more where the iterator is made after the restore."""

    def states(place, stop=None):
        parts, found = AugmentedParts(workers), {}
        with Checkpointer(place, **parts.tracked(), every="1 steps") as ckpt:
            for _ in ckpt.epochs(2):
                for batch in ckpt.batches():
                    at = ckpt.cursor.micro_batches
                    found[at] = bytes(torch.get_rng_state())
                    if at == stop:
                        raise Crash
                    parts.train_on(batch, ckpt.cursor.micro == 1)
        return found

    straight = states(tmp_path / "straight")
    with pytest.raises(Crash):
        states(tmp_path / "run", stop)
    resumed = states(tmp_path / "run")
    assert resumed == {at: straight[at] for at in resumed}
    assert stop in resumed
