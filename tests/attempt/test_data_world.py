"""`mesh` and `data_dims`: how many ranks see different data, checked against the samplers."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import trainckpt
from tests.end_to_end.training import record
from trainckpt.errors import ConfigurationError

MESH = SimpleNamespace(mesh_dim_names=("dp", "cp", "tp"), shape=(2, 3, 4))


def loader(replicas):
    data = TensorDataset(torch.zeros(12, 2))
    return DataLoader(data, 2, sampler=DistributedSampler(data, replicas, 0))


@pytest.mark.parametrize(
    ("dims", "number"), [(("dp",), 2), ("dp", 2), (["dp", "cp"], 6), (("dp", "cp", "tp"), 24)]
)
def test_the_ranks_that_see_different_data_are_recorded(tmp_path, dims, number):
    with trainckpt.Checkpointer(
        tmp_path / "run", model=nn.Linear(2, 2), loader=loader(number), mesh=MESH, data_dims=dims
    ):
        pass
    assert record(tmp_path / "run", 1)["data_ranks"] == number


def test_a_sampler_that_deals_to_another_number_is_refused_with_both(tmp_path):
    batches = BatchSampler(loader(3).sampler, 2, drop_last=False)
    own = DataLoader(loader(3).dataset, batch_sampler=batches)
    for wrong in (loader(3), own):
        with (
            pytest.raises(ConfigurationError, match="to 3 ranks") as refused,
            trainckpt.Checkpointer(
                tmp_path / "run", model=nn.Linear(2, 2), loader=wrong, mesh=MESH, data_dims="dp"
            ),
        ):
            pass
        assert "2 see different data" in refused.value.message
        assert "num_replicas=2" in refused.value.hint


@pytest.mark.parametrize(
    "given",
    [
        {"data_dims": ("dp",)},
        {"mesh": MESH},
        {"mesh": MESH, "data_dims": ("pp",)},
        {"mesh": MESH, "data_dims": ("dp", "dp")},
        {"mesh": SimpleNamespace(mesh_dim_names=None, shape=(2,)), "data_dims": ("dp",)},
    ],
)
def test_one_without_the_other_or_an_unknown_name_is_refused(tmp_path, given):
    with pytest.raises(ConfigurationError, match="data_dims"):
        trainckpt.Checkpointer(tmp_path / "run", model=nn.Linear(2, 2), **given)


def test_a_refused_loader_leaves_no_handler_behind(tmp_path):
    """Nobody else ends a Checkpointer that could not set out."""
    before = signal.getsignal(signal.SIGTERM)
    ckpt = trainckpt.Checkpointer(
        tmp_path / "run", model=nn.Linear(2, 2), loader=loader(3), mesh=MESH, data_dims="dp"
    )
    with pytest.raises(ConfigurationError, match="to 3 ranks"):
        ckpt.resume()
    assert signal.getsignal(signal.SIGTERM) is before
