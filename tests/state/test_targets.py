"""What a rank reads for its live tensors, where it holds them in another layout."""

from __future__ import annotations

import pytest
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from tests.state.helpers import registry
from trainckpt.format.layout import replicated
from trainckpt.format.manifest import RANK, SPLIT, TensorEntry
from trainckpt.state.targets import find_targets


@pytest.fixture
def sharded():
    """A registry of one model that FSDP2 shards over one rank."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield registry(model=fully_shard(nn.Linear(4, 3, bias=False)))
    distributed.destroy_process_group()


def test_what_is_each_rank_s_own_is_not_divided_anew(sharded):
    entries = {"model/weight": TensorEntry("F32", (3, 4), RANK)}
    found = find_targets(sharded, {}, entries, world=1, then=2)
    assert found.problems == [
        "model/weight is another one on each rank, so it cannot be divided anew"
    ]


def test_what_is_each_rank_s_own_may_have_another_shape_than_the_first_rank_s(sharded):
    entries = {"model/weight": TensorEntry("F32", (9, 4), RANK)}
    found = find_targets(sharded, {}, entries, world=1, then=1)
    assert (found.problems, found.wanted) == ([], {"model/weight": None})


def test_what_all_ranks_had_is_divided_as_it_is_now(sharded):
    entries = {"model/weight": TensorEntry("F32", (3, 4), SPLIT, replicated(2))}
    found = find_targets(sharded, {}, entries, world=1, then=2)
    assert found.problems == []
    assert found.wanted["model/weight"].shape == (3, 4)
