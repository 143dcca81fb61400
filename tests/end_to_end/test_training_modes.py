"""The training mode of each module is part of the state: a resume sets it as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.end_to_end.training import Crash, record
from tests.state.helpers import frozen, registry, saved_of
from trainckpt import Checkpointer
from trainckpt.state.adapters.model import MODES


def norm_once(model, step):
    """BatchNorm keeps its statistics from step 2 on."""
    if step == 2:
        model[1].eval()


def all_once(model, step):
    if step == 2:
        model.eval()


def in_turns(model, step):
    model.train()
    model[1].train(step % 2 == 0)


def attempt(place, change, *, evaluate=None, epochs=4, stop_at=None, every="1 step"):
    """Return whether each module trained, with the loss, by step, and the tensors in the end."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loader = DataLoader(torch.randn(8, 4), batch_size=4)
    found = {}
    with Checkpointer(place, model=model, optimizer=optimizer, loader=loader, every=every) as ckpt:
        for _ in ckpt.epochs(epochs):
            for batch in ckpt.batches():
                step = ckpt.cursor.step
                if step == stop_at:
                    raise Crash
                change(model, step)
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found[step] = [module.training for module in model.modules()], loss.item().hex()
            if evaluate is not None:
                evaluate(ckpt, model, stop_at)
        model.eval()
    return found, frozen(model.state_dict())


def and_back(ckpt, model, stop_at):
    model.eval()
    with ckpt.evaluation():
        if stop_at == -ckpt.cursor.step:
            raise Crash
    model.train()
    model[1].eval()


def without_return(ckpt, model, stop_at):
    """Many loops forget to set the model to training again."""
    model.eval()


@pytest.mark.parametrize(
    ("change", "evaluate", "stop_at"),
    [
        (norm_once, None, 5),
        (norm_once, None, 4),
        (all_once, None, 3),
        (in_turns, None, 3),
        (lambda *_: None, without_return, 3),
        (lambda *_: None, and_back, 3),
        (lambda *_: None, and_back, -4),
    ],
    ids=[
        "a layer once",
        "a layer, before an epoch",
        "the model once",
        "in each batch",
        "an evaluation leaves it",
        "an evaluation before",
        "stopped in an evaluation",
    ],
)
def test_modules_train_after_a_resume_as_in_the_uninterrupted_run(
    tmp_path, change, evaluate, stop_at
):
    whole, end = attempt(tmp_path / "straight", change, evaluate=evaluate, every="never")
    with pytest.raises(Crash):
        attempt(tmp_path / "run", change, evaluate=evaluate, stop_at=stop_at)
    rest, same = attempt(tmp_path / "run", change, evaluate=evaluate)
    assert rest == {step: whole[step] for step in rest}
    assert min(rest) == abs(stop_at)
    assert same == end
    assert record(tmp_path / "run", 2)["outcome"]["exactness"] == "bitwise"


def test_a_run_that_goes_on_after_its_end_trains_though_the_script_had_set_evaluation(tmp_path):
    whole, _ = attempt(tmp_path / "straight", norm_once)
    attempt(tmp_path / "run", lambda *_: None, epochs=2)
    more, _ = attempt(tmp_path / "run", lambda *_: None)
    assert sorted(more) == [4, 5, 6, 7]
    assert all(all(modes) for modes, _ in more.values())
    assert not all(all(modes) for modes, _ in whole.values())


def test_a_snapshot_of_an_older_version_leaves_the_modes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    saved = saved_of(registry(model=model))
    other = registry(model=nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()).models[0]
    other.apply_modes(saved)
    assert [part.training for part in other.module.modules()] == [True, True, False]
    del saved.values["model"][MODES]
    other.module.eval()
    other.apply_modes(saved)
    assert not any(part.training for part in other.module.modules())
