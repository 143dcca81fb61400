"""What a tracked object makes of the state it loads is compared with that state."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tests.end_to_end.training import Crash, Parts, record
from tests.state.helpers import registry, saved_of
from tests.state.test_stateful import SCHEDULERS, build
from trainckpt import Checkpointer
from trainckpt.format.exactness import How
from trainckpt.state import apply


class Keeps:
    """An object of the script's: loads what it is given, by attribute."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = self.loaded(state)

    def loaded(self, state):
        return state


class Forgets(Keeps):
    def loaded(self, state):
        return {key: value for key, value in state.items() if key != "best"}


class Casts(Keeps):
    def loaded(self, state):
        return {key: value.bfloat16().float() for key, value in state.items()}


class Reshaped(Keeps):
    def loaded(self, state):
        return {
            key: [*value] if isinstance(value, tuple) else value
            for key, value in reversed(state.items())
        }


class Rescales(Keeps):
    def loaded(self, state):
        return {"weights": state["weights"].astype("float32")}


class Late(Keeps):
    """Keeps what it loads for its first step."""

    def load_state_dict(self, state):
        self.later = state


class Breaks(Keeps):
    def loaded(self, state):
        return None

    def state_dict(self):
        return dict(super().state_dict())


class Clock(Keeps):
    """Says how long it has run; at first a hundred seconds."""

    def __init__(self):
        super().__init__(step=3)
        self.begun_s = time.monotonic() - 100

    def state_dict(self):
        return {**self.state, "elapsed_time": time.monotonic() - self.begun_s}


def found(then, now):
    """What is said of one object once it has loaded the state of another."""
    source, target = registry(thing=then), registry(thing=now)
    saved = saved_of(source)
    apply.apply(target, saved)
    return target.generics[0].compare(saved)


@pytest.mark.parametrize(
    ("kind", "state", "paths"),
    [
        (Forgets, {"best": 0.5, "wait": 2}, "thing.best"),
        (
            Forgets,
            {"best": {"f1": [1, 2], "of": {}}},
            "thing, thing.best.f1.0, thing.best.f1.1 and",
        ),
        (Casts, {"shadow": torch.tensor([1.0, 1.001])}, "thing.shadow"),
        (Rescales, {"weights": np.arange(3) / 7}, "thing.weights"),
        (Late, {"step": 4}, "thing.step"),
    ],
)
def test_what_does_not_come_back_is_named_and_not_kept(kind, state, paths):
    (part,) = found(kind(**state), kind(**dict.fromkeys(state, torch.zeros(1))))
    assert (part.name, part.how) == ("thing", How.NOT_KEPT)
    assert f"what a {kind.__name__} gives by state_dict() after" in part.reason
    assert f"is not what was loaded: {paths}" in part.reason


def test_an_object_that_cannot_tell_its_state_after_loading_is_named():
    (part,) = found(Breaks(step=4), Breaks(step=0))
    assert "thing does not tell its state after it was loaded: 'NoneType' object" in part.reason


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_nothing_is_said_of_schedulers(make):
    (_, optimizer, then), (_, _, now) = build(make), build(make)
    for _ in range(3):
        optimizer.step()
        then.step(*([0.5] if isinstance(then, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    assert found(then, now) == []


STATE = {
    "betas": (0.9, 0.99),
    "worst": float("nan"),
    "best": float("-inf"),
    "seen": {3, 1},
    "by epoch": {1: 0.5, 2: 0.25},
    "bytes": b"x",
    "complex": 1 + 2j,
    "shadow": {"a": torch.tensor([float("nan"), -0.0]), "b": [np.float32(0.1), np.arange(4)]},
    "empty": [],
    "nothing": None,
}


@pytest.mark.parametrize("kind", [Keeps, Reshaped])
def test_nothing_is_said_of_what_comes_back_in_another_order_or_as_a_list(kind):
    assert found(kind(**STATE), kind()) == []


def test_nothing_is_said_of_a_scaler():
    def make():
        return torch.amp.GradScaler("cpu", init_scale=8.0)

    then = make()
    then.scale(torch.ones(1))
    assert found(then, make()) == []


def test_nothing_is_said_of_a_clock_that_has_run_on():
    assert found(Clock(), Clock()) == []


def test_a_resume_names_the_object_and_its_record_does(tmp_path, caplog):
    """An early stopping whose best value is lost."""

    def attempt(number):
        parts = Parts()
        early = Forgets(best=0.25, wait=number)
        with Checkpointer(tmp_path, early=early, every="1 steps", **parts.tracked()) as ckpt:
            for at, batch in enumerate(ckpt.batches()):
                if number == 1 and at == 2:
                    raise Crash
                parts.train_on(batch, last=True)

    caplog.set_level("INFO", "trainckpt")
    with pytest.raises(Crash):
        attempt(1)
    attempt(2)
    assert ": same data, not bitwise: early" in caplog.text
    assert "not bitwise: early: what a Forgets gives by state_dict()" in caplog.text
    outcome = record(tmp_path, 2)["outcome"]
    assert outcome["exactness"] == "same data, not bitwise"
    assert [(part["name"], part["how"]) for part in outcome["restored"]] == [("early", "not kept")]
