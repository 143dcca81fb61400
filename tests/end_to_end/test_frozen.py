"""What a script freezes and thaws by itself: a resume says when that is not as it was saved."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.end_to_end.training import Crash, record
from tests.state.helpers import frozen, registry, saved_of
from trainckpt import Checkpointer
from trainckpt.state.adapters.model import FROZEN


def once(model, epoch):
    if epoch == 1:
        model[0].requires_grad_(True)


def from_then_on(model, epoch):
    model[0].requires_grad_(epoch >= 1)


def never(model, epoch):
    """The layer stays frozen."""


def attempt(place, thaw=never, toggle=False, stop_at=None, every="1 step"):
    """Losses by step, and the parameters in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loader = DataLoader(torch.randn(8, 4), batch_size=4)
    losses = {}
    with Checkpointer(place, model=model, optimizer=optimizer, loader=loader, every=every) as ckpt:
        for epoch in ckpt.epochs(4):
            thaw(model, epoch)
            for batch in ckpt.batches():
                step = ckpt.cursor.step
                if step == stop_at:
                    raise Crash
                if toggle:
                    model.requires_grad_(True)
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[step] = loss.item().hex()
                if toggle:
                    model[1].requires_grad_(False)
    return losses, frozen(model.state_dict())


def resumed(place, caplog, stop_at, **how):
    """What the straight run and the resumed one have from there on, and what was said."""
    whole, end = attempt(place / "straight", every="never", **how)
    with pytest.raises(Crash):
        attempt(place / "run", stop_at=stop_at, **how)
    caplog.clear()
    with caplog.at_level(logging.INFO, "trainckpt"):
        rest, same = attempt(place / "run", **how)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("not exact")]
    exactness = record(place / "run", 2)["outcome"]["exactness"]
    return rest == {s: whole[s] for s in rest} and same == end, exactness, said


@pytest.mark.parametrize("stop_at", [5, pytest.param(6, marks=pytest.mark.long)])
def test_a_layer_that_a_resume_leaves_frozen_is_named(tmp_path, caplog, stop_at):
    is_equal, exactness, said = resumed(tmp_path, caplog, stop_at, thaw=once)
    assert not is_equal
    assert exactness == "same data, not bitwise"
    assert len(said) == 1
    assert "frozen now, trained when it was saved: model/0.bias, model/0.weight" in said[0]


def test_a_layer_that_was_frozen_then_is_named_too(tmp_path, caplog):
    with pytest.raises(Crash):
        attempt(tmp_path, never, stop_at=3)
    with caplog.at_level(logging.INFO, "trainckpt"):
        attempt(tmp_path, lambda model, epoch: model.requires_grad_(True))
    assert "trained now, frozen when it was saved: model/0.bias, model/0.weight" in caplog.text


@pytest.mark.parametrize(
    "how",
    [{"thaw": from_then_on}, {"thaw": never}, {"toggle": True}],
    ids=["epoch after epoch", "never", "by turns"],
)
@pytest.mark.parametrize("stop_at", [pytest.param(2, marks=pytest.mark.long), 5])
def test_a_script_that_sets_it_again_goes_on_bitwise_and_nothing_is_said(
    tmp_path, caplog, stop_at, how
):
    assert resumed(tmp_path, caplog, stop_at, **how) == (True, "bitwise", [])


def test_a_layer_thawed_between_the_snapshot_and_the_next_batch_is_no_difference(tmp_path, caplog):
    # The boundary that ends epoch 0 is passed again, and only then the layer is thawed.
    assert resumed(tmp_path, caplog, 2, thaw=once) == (True, "bitwise", [])


def test_a_snapshot_of_an_older_version_says_nothing_of_it():
    model = nn.Linear(2, 2)
    saved = saved_of(registry(model=model))
    model.bias.requires_grad_(False)
    assert registry(model=model).models[0].frozen_otherwise(saved) == {"model/bias": False}
    del saved.values["model"][FROZEN]
    assert registry(model=model).models[0].frozen_otherwise(saved) == {}
