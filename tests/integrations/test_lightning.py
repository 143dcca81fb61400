"""A fit of Lightning that was stopped and resumed is the fit that was never stopped.

Several fits in one process, each with all objects made anew; a stop is a real SIGTERM, and the
Trainer's `fit` returns (on_stop="return").
"""

from __future__ import annotations

import pytest

from tests.integrations.toy_lightning import Alternating, StopAt, Toy, fit, loaders
from tests.state.helpers import frozen

pytestmark = pytest.mark.filterwarnings("ignore")


def same(straight, parts):
    """The parts of a run, put together, are the straight run."""
    assert [line for part in parts for line in part.seen] == straight.seen
    assert [note for part in parts for note in part.notes] == straight.notes
    for name, value in straight.end.items():
        assert frozen(parts[-1].end[name]) == frozen(value), name


@pytest.fixture(scope="module")
def straight():
    """The run without a stop, and without the callback."""
    return fit()


def test_the_callback_changes_nothing(tmp_path, straight):
    same(straight, [fit(tmp_path)])


# Windows are of 4, 4 and 2 micro-batches: their first, middle and last; an epoch's first and last.
@pytest.mark.parametrize("micro", [0, 5, 7, 9, 10, 13, 29])
def test_a_stop_at_any_micro_batch_shows_in_nothing(tmp_path, straight, micro):
    first = fit(tmp_path, stop=StopAt(micro))
    assert len(first.seen) == micro + 1
    same(straight, [first, fit(tmp_path, seed=99)])


def test_a_stop_in_a_validation_waits_for_its_end(tmp_path, straight):
    first = fit(tmp_path, stop=StopAt(9, in_validation=True))
    assert (len(first.seen), len(first.notes)) == (10, 4)
    same(straight, [first, fit(tmp_path, seed=99)])


def test_several_stops_in_one_run(tmp_path, straight):
    parts = [fit(tmp_path, stop=StopAt(at), seed=at + 5) for at in (2, 3, 11, 24)]
    same(straight, [*parts, fit(tmp_path)])


def test_a_finished_fit_that_is_started_again_trains_nothing(tmp_path, straight):
    fit(tmp_path)
    again = fit(tmp_path, seed=99)
    assert again.seen == []
    assert frozen(again.end) == frozen(straight.end)


HOW = {
    "validation in mid-epoch": {"val_check_interval": 3},
    "sanity check": {"num_sanity_val_steps": 2},
    "bf16": {"precision": "bf16-mixed"},
    "max_steps in mid-epoch": {"max_epochs": -1, "max_steps": 7},
    "gradients clipped": {"gradient_clip_val": 0.1},
    "limits": {"limit_train_batches": 7, "limit_val_batches": 1},
}


@pytest.mark.parametrize("how", HOW, ids=str)
def test_whatever_the_trainer_is_told(tmp_path, how):
    straight = fit(**HOW[how])
    parts = [fit(tmp_path, stop=StopAt(8), **HOW[how]), fit(tmp_path, seed=99, **HOW[how])]
    same(straight, parts)


MODULES = {
    "manual optimization": Alternating,
    "schedule by epochs": lambda: Toy("epoch"),
    "schedule by a plateau": lambda: Toy("plateau"),
}


@pytest.mark.parametrize("kind", MODULES, ids=str)
def test_whatever_the_module_optimizes_with(tmp_path, kind):
    make = MODULES[kind]
    straight = fit(module=make)
    for at in (5, 19):
        place = tmp_path / str(at)
        place.mkdir()
        parts = [fit(place, stop=StopAt(at), module=make), fit(place, seed=99, module=make)]
        same(straight, parts)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_and_their_randomness(tmp_path, persistent):
    def data():
        return loaders(2, persistent_workers=persistent)

    how = {"num_sanity_val_steps": 1, "val_check_interval": 4}
    straight = fit(data=data(), **how)
    parts = [fit(tmp_path, stop=StopAt(14), data=data(), **how), fit(tmp_path, data=data(), **how)]
    same(straight, parts)
