"""What a rank reads for its live tensors, where it holds them in another layout."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.state.helpers import registry
from trainckpt.format.layout import replicated
from trainckpt.format.manifest import TensorEntry
from trainckpt.state.dtensor import _with_the_rest, layout_of
from trainckpt.state.restore_targets import find_targets


@pytest.fixture
def sharded():
    """A registry of one model that FSDP2 shards over one rank."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield registry(model=fully_shard(nn.Linear(4, 3, bias=False)))
    distributed.destroy_process_group()


def test_what_is_each_rank_s_own_is_not_divided_anew(sharded):
    entries = {"model/weight": TensorEntry("F32", (3, 4))}
    found = find_targets(sharded, {}, entries, world=1, then=2)
    assert found.problems == [
        "model/weight is another one on each rank, so it cannot be divided anew"
    ]


def test_what_is_each_rank_s_own_may_have_another_shape_than_the_first_rank_s(sharded):
    entries = {"model/weight": TensorEntry("F32", (9, 4))}
    found = find_targets(sharded, {}, entries, world=1, then=1)
    assert (found.problems, found.wanted) == ([], {"model/weight": None})


def test_what_all_ranks_had_is_divided_as_it_is_now(sharded):
    entries = {"model/weight": TensorEntry("F32", (3, 4), replicated(2))}
    found = find_targets(sharded, {}, entries, world=1, then=2)
    assert found.problems == []
    assert found.wanted["model/weight"].shape == (3, 4)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([0, 2, 4, 6], [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ([1, 3, 5, 7], [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ([4, 5, 6, 7], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0, 3], [0, 3]),
        ([0, 4, 2, 6], [0, 4, 2, 6]),
    ],
)
def test_a_flattened_part_of_a_mesh_is_seen_alike_by_all_ranks(ranks, expected):
    """Two of the dimensions (2, 2, 2) made one; what is no part is left as it is."""
    root = torch.arange(8).reshape(2, 2, 2)
    assert _with_the_rest(torch.tensor(ranks), root).tolist() == expected


def test_flattened_and_named_parts_of_a_mesh_have_a_layout_of_the_whole_world(sharded):
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    for part in (mesh["dp"], mesh["dp", "cp"]._flatten("dp_cp")):
        found = layout_of(fully_shard(nn.Linear(4, 3), mesh=part).weight)
        assert found.dims[-1] == 0
        assert found.num_replicas == 1
