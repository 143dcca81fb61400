"""Parameter groups that join an optimizer as it trains are there again after a resume."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.end_to_end.unfreezing import once, train, train_sharded, unless_there
from tests.ranks.processes import preload, run_ranks
from trainckpt import Checkpointer
from trainckpt.errors import StateMismatch

preload("tests.end_to_end.unfreezing")


@pytest.mark.parametrize("joins", [once, unless_there])
@pytest.mark.parametrize(
    "stop",
    [3, pytest.param(4, marks=pytest.mark.long), 5, 6, pytest.param(8, marks=pytest.mark.long)],
)
def test_groups_that_joined_go_on_exactly_wherever_the_run_stops(tmp_path, caplog, joins, stop):
    """Also where the script comes by the place again that adds them."""
    caplog.set_level(logging.DEBUG, "trainckpt")
    straight, _ = train(tmp_path / "straight", joins, 12)
    train(tmp_path / "run", joins, stop)
    rest, ckpt = train(tmp_path / "run", joins, 12)
    assert ckpt.resumed_from.micro_batches == stop
    assert rest == {number: state for number, state in straight.items() if number >= stop}
    said = "optimizer got 1 parameter groups from the snapshot"
    assert (said in caplog.text) == (stop > 3)
    assert "this resume is bitwise" in caplog.text


def test_groups_that_joined_are_divided_anew_on_another_number_of_ranks(tmp_path):
    two = run_ranks(train_sharded, 2, str(tmp_path), 3)
    ((rates, moments, is_resumed),) = run_ranks(train_sharded, 1, str(tmp_path), 0)
    assert is_resumed
    assert (rates, moments) == two[0][:2]


def test_the_same_group_twice_is_torchs_error_again_once_training_goes_on(tmp_path):
    train(tmp_path, once, 5)
    with pytest.raises(ValueError, match="more than one parameter group"):
        train(tmp_path, once, 12, make=Twice)


class Twice(torch.optim.AdamW):
    """Is given its first parameters once more with the first step."""

    def step(self, closure=None):
        self.add_param_group({"params": self.param_groups[-1]["params"]})


Twice.__qualname__ = "AdamW"


def test_groups_of_parameters_that_no_tracked_model_has_are_refused_with_what_to_do(tmp_path):
    train(tmp_path, once, 5, tracks_all=False)
    with pytest.raises(StateMismatch) as caught:
        train(tmp_path, once, 12, tracks_all=False)
    (difference,) = caught.value.differences
    assert difference == (
        "optimizer had 2 parameter groups, has 1: no tracked model has optimizer.group1.0; add "
        "them before the Checkpointer is made"
    )


@pytest.mark.parametrize("tracks_all", [True, False])
def test_groups_that_no_resume_can_add_are_said_at_the_first_save_with_them(
    tmp_path, caplog, tracks_all
):
    train(tmp_path, once, 6, tracks_all=tracks_all)
    told = [r.getMessage() for r in caplog.records if "parameter groups" in r.getMessage()]
    assert [line.partition(":")[0] for line in told] == (
        [] if tracks_all else ["optimizer has 2 parameter groups, and had 1 when the run began"]
    )


def test_parameters_that_are_named_otherwise_than_at_the_start_are_said_once(tmp_path, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with Checkpointer(tmp_path, model=model, every="never") as ckpt:
        model.append(torch.nn.Linear(2, 2))
        for _ in range(2):
            ckpt.save()
            ckpt.boundary()
    (told,) = [r.getMessage() for r in caplog.records if "parameter names" in r.getMessage()]
    assert told == (
        "the parameter names of model have changed since the run began (model/1.bias is new). A "
        "resume is refused unless the script builds the model with the present names"
    )
