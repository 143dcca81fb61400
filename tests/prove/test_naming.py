"""Parts of the state in people's words, causes before effects."""

from __future__ import annotations

import pytest

from trainckpt.prove.compare import blame_order, say

SAID = {
    "CosineAnnealingLR, which is not tracked": "CosineAnnealingLR, which is not tracked",
    "ddp.model.bucket_order": "DDP bucket order of model",
    "ddp.model.0.forward_sync": "DDP forward-sync flag of model.0",
    "loader.now.integers.sampler.seed": "sampler seed",
    "loader.now.integers.batch sampler's sampler.epoch": "batch sampler's sampler epoch",
    "loader.1.now.integers.sampler.seed": "sampler seed (loader.1)",
    "loader.now.generators.loader": "generator of the loader",
    "loader.now.samplers.sampler.position": "sampler: position",
    "loader.workers.1.numpy": "NumPy RNG of worker 1",
    "loader.base_seed": "base seed of the workers",
    "rng/torch": "torch RNG",
    "rng/cuda:0": "cuda:0 RNG",
    "rng.python": "Python RNG",
    "loader.rng_before.torch": "torch RNG before the epoch's iterator",
    "loader.before.integers.sampler.seed": "data loader: sampler.seed before the epoch's iterator",
    "loader.own.position": "data loader: position",
    "loader.facts.num_workers": "data loader: num_workers",
    "loader.batches": "data loader: batches",
    "scheduler.last_epoch": "scheduler: last_epoch",
    "buffer/model/norm.running_mean": "buffer model/norm.running_mean",
    "gradients/model/blocks.0.weight": "gradient of model/blocks.0.weight",
    "optimizer.groups.0.options.lr": "optimizer: lr of group 0",
    "optimizer.1.groups.0.options.lr": "optimizer.1: lr of group 0",
    "optimizer/group0.lr": "optimizer: lr of group 0",
    "optimizer/model/blocks.0.weight/exp_avg": "optimizer exp_avg of model/blocks.0.weight",
    "optimizer.0/model/w/step": "optimizer.0 step of model/w",
    "parameter/model/blocks.0.weight": "parameter model/blocks.0.weight",
}


@pytest.mark.parametrize("part", SAID)
def test_each_part_is_said_as_people_say_it(part):
    """The paths are the recorder's."""
    assert say(part) == SAID[part]


def test_causes_are_blamed_before_effects():
    """In one boundary where all of it differs, the first name is where to look."""
    causes_first = [
        "CosineAnnealingLR, which is not tracked",
        "ddp.model.bucket_order",
        "loader.now.integers.sampler.seed",
        "loader.workers.1.numpy",
        "rng/torch",
        "loader.batches",
        "scheduler.last_epoch",
        "buffer/model/norm.running_mean",
        "gradients/model/w",
        "optimizer/model/w/exp_avg",
        "parameter/model/w",
    ]
    assert sorted(set(causes_first), key=blame_order) == causes_first


def test_what_is_unknown_is_said_as_it_is():
    """A part of a kind that nobody thought of still has a name."""
    assert say("something else") == "something else"
