"""Ranks that are not at one place: nothing mixed is ever committed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.end_to_end import ranks
from tests.end_to_end.training import Parts, usable
from tests.ranks.processes import preload, run_ranks
from trainckpt import Checkpointer
from trainckpt.errors import SaveFailed, TrainckptError

preload("tests.end_to_end.ranks")


def evaluates_alone(rank, place):
    """Rank 0 alone enters an evaluation, where a save is due; what became of it."""
    model, optimizer, loader = ranks.parts(rank, 2, wrap=False)
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="never"
    ) as ckpt:
        for epoch in ckpt.epochs(3):
            for (x,) in ckpt.batches():
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 0:
                pending = ckpt.save()
                if rank == 0:
                    with ckpt.evaluation():
                        pass
        with pytest.raises(SaveFailed) as failure:
            pending.wait("durable", 30)
    return failure.value.message


def test_a_save_that_falls_on_two_places_fails_and_says_so_and_the_run_goes_on(tmp_path):
    one, two = run_ranks(evaluates_alone, 2, str(tmp_path / "run"))
    assert one == two
    assert "the ranks are not at one boundary: [[0, 6, 0, " in one
    assert usable(tmp_path / "run") == ["s18~1.2"]  # the final one alone
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["s18~1.2"]


def has_more_batches(rank, place):
    """Rank 1's loader is longer; the error that each ends with."""
    parts = Parts()
    data = torch.utils.data.TensorDataset(torch.randn(4 + 2 * rank, 4), torch.arange(4 + 2 * rank))
    try:
        with Checkpointer(place, **{**parts.tracked(), "loader": DataLoader(data, 2)}):
            pass
    except TrainckptError as error:
        return type(error).__name__, error.exit_code, error.message
    return None


def test_loaders_of_different_lengths_are_refused_by_all_ranks(tmp_path):
    refusals = run_ranks(has_more_batches, 2, str(tmp_path / "run"))
    message = "loader has different numbers of batches on the ranks: [2, 3]"
    assert refusals == [("ConfigurationError", 78, message)] * 2
    assert not (tmp_path / "run").exists()
