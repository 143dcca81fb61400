"""Slips in a loop: a boundary that is never reached, epochs counted from 0, an exit inside."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from tests.end_to_end.training import Parts, crashed, record, usable
from tests.state.helpers import frozen
from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError, TierUnavailable

STEPS_AN_EPOCH = 5


def opened(place, parts=None, **options):
    parts = parts or Parts()
    return parts, Checkpointer(place, **parts.tracked(), **{"every": "never", **options})


def steps(parts, number=STEPS_AN_EPOCH):
    for _ in range(number):
        parts.train_on((torch.rand(2, 4), torch.arange(2)), last=True)


def past_the_boundary(place, epochs, parts=None, evaluates=False):
    """`for batch in loader` where `in ckpt.batches()` was meant."""
    parts, made = opened(place, parts)
    with made as ckpt:
        for _ in ckpt.epochs(epochs):
            for batch in parts.loader:
                parts.train_on(batch, last=True)
            if evaluates:
                with ckpt.evaluation():
                    pass
        parts.trained = frozen(parts.model.state_dict())


def own_epochs(place, epochs, warm_up=0, at_the_end=0, asks=True):
    """Loops that are right: a warm-up before them, steps after each pass."""
    parts, made = opened(place)
    with made as ckpt:
        tracked = ckpt.loader(parts.loader)
        steps(parts, warm_up)
        for _ in range(ckpt.cursor.epoch if asks else 0, epochs):
            for batch in tracked:
                parts.train_on(batch, last=True)
            steps(parts, at_the_end)
    return parts


def said(caplog, *words):
    """How often something was said that has all these words."""
    return sum(all(w in r.getMessage() for w in words) for r in caplog.records)


@pytest.fixture(autouse=True)
def _hears(caplog):
    caplog.set_level(logging.INFO, "trainckpt")


def test_steps_without_a_boundary_are_warned_of_once(tmp_path, caplog):
    past_the_boundary(tmp_path, 2)
    assert said(caplog, "2 optimizer steps", "no boundary", "ckpt.batches()") == 1
    assert said(caplog, "no boundary") == 1


def test_a_loop_without_any_of_ours_is_warned_of(tmp_path, caplog):
    parts = Parts()
    with Checkpointer(tmp_path, model=parts.model, optimizer=parts.optimizer) as ckpt:
        steps(parts, 20)
        assert not said(caplog, "no boundary")
        steps(parts, 1)
        assert said(caplog, "21 optimizer steps", "ckpt.boundary()") == 1
    assert ckpt.cursor.step == 21
    assert said(caplog, "no boundary") == 1


def test_a_short_one_is_warned_of_at_its_end(tmp_path, caplog):
    parts, made = opened(tmp_path)
    with made:
        steps(parts, 3)
    assert said(caplog, "3 optimizer steps", "no boundary") == 1


def test_what_a_resumed_run_trained_past_its_boundary_is_refused_and_never_undone(tmp_path):
    past_the_boundary(tmp_path, 1)
    before = usable(tmp_path)
    parts = Parts()
    with pytest.raises(ConfigurationError, match="took 5 optimizer steps") as refusal:
        past_the_boundary(tmp_path, 2, parts)
    assert refusal.value.exit_code == 78
    assert "ckpt.batches()" in refusal.value.hint
    assert frozen(parts.model.state_dict()) == parts.trained
    assert usable(tmp_path) == before
    outcome = record(tmp_path, 2)["outcome"]
    assert (outcome["outcome"], outcome["exit_code"]) == ("failed", 78)


def test_an_evaluation_that_is_not_the_snapshot_s_does_not_hide_it(tmp_path):
    past_the_boundary(tmp_path, 1)
    with pytest.raises(ConfigurationError, match="without reaching the boundary"):
        past_the_boundary(tmp_path, 2, evaluates=True)


@pytest.mark.parametrize("how", [{}, {"warm_up": 20}, {"at_the_end": 1}])
def test_loops_that_are_right_are_neither_warned_of_nor_refused(tmp_path, caplog, how):
    """Nor when nothing is left of them, or more epochs are wanted than were trained."""
    end = own_epochs(tmp_path, 1, **how).state()
    if "warm_up" not in how:
        assert own_epochs(tmp_path, 1, **how).state() == end
    own_epochs(tmp_path, 2, **how)
    assert not said(caplog, "no boundary")
    assert not said(caplog, "the loop has not asked")
    assert record(tmp_path, 2)["outcome"]["outcome"] == "finished"


def test_a_warm_up_before_epochs_of_which_none_is_left_changes_nothing(tmp_path, caplog):
    def script():
        parts, made = opened(tmp_path)
        with made as ckpt:
            steps(parts, 3)
            for _ in ckpt.epochs(1):
                for batch in ckpt.batches():
                    parts.train_on(batch, last=True)
        return parts

    end = script().state()
    assert script().state() == end
    assert not said(caplog, "no boundary")


def test_several_steps_in_one_micro_batch_are_no_slip(tmp_path, caplog):
    parts, made = opened(tmp_path)
    with made as ckpt:
        for _ in ckpt.batches():
            steps(parts, 30)
        while ckpt.cursor.micro_batches < 8 and ckpt.boundary():
            steps(parts, 30)
    assert not said(caplog, "no boundary")


def test_a_loop_over_its_own_range_is_told_that_it_goes_on_in_a_later_epoch(tmp_path, caplog):
    crashed(tmp_path, 8)
    own_epochs(tmp_path, 2, asks=False)
    assert said(caplog, "goes on in epoch 1", "ckpt.epochs(E)", "ckpt.cursor.epoch") == 1


@pytest.mark.parametrize("asks", ["epochs", "cursor", "hook"])
def test_a_loop_that_knows_its_epoch_is_not_told(tmp_path, caplog, asks):
    crashed(tmp_path, 8)
    _, made = opened(tmp_path)
    if asks == "hook":
        made.on_resume(lambda cursor, lost: None)
    with made as ckpt:
        if asks == "epochs":
            next(ckpt.epochs(2))
        elif asks == "cursor":
            assert ckpt.cursor.epoch == 1
        next(ckpt.batches())
    assert not said(caplog, "the loop has not asked")


def test_a_resume_in_the_first_epoch_says_nothing_of_epochs(tmp_path, caplog):
    crashed(tmp_path, 4)
    _, made = opened(tmp_path)
    with made as ckpt:
        next(ckpt.batches())
    assert record(tmp_path, 2)["outcome"]["outcome"] == "finished"
    assert not said(caplog, "the loop has not asked")


@pytest.mark.parametrize("code", [0, None, 3, -1])
def test_a_script_that_exits_inside_its_block_is_told_what_it_loses(tmp_path, caplog, code):
    """Not one that fails, which says so itself; nor where all is saved."""

    def leave(saves):
        parts, made = opened(tmp_path / "run")
        with made as ckpt:
            for _ in ckpt.batches():
                steps(parts, 1)
                if ckpt.cursor.micro_batches == 3:
                    if saves:
                        ckpt.close()
                    sys.exit(code)

    with pytest.raises(SystemExit):
        leave(saves=False)
    lost = said(caplog, "left by sys.exit() at", "with 3 unsaved micro-batches", "step 0")
    assert lost == (0 if code else 1)
    assert record(tmp_path / "run", 1)["outcome"]["exit_code"] == (code or 0) & 0xFF
    with pytest.raises(SystemExit):
        leave(saves=True)
    assert said(caplog, "left by sys.exit()") == lost


def test_a_checkpointer_that_tracks_nothing_but_data_says_so(tmp_path, caplog):
    parts = Parts()
    with Checkpointer(tmp_path / "bare", loader=parts.loader):
        assert said(caplog, "no model and no optimizer is tracked") == 1
    with opened(tmp_path / "run", parts)[1]:
        pass
    assert said(caplog, "no model and no optimizer is tracked") == 1


def test_a_loader_under_another_keyword_is_refused_with_the_right_one(tmp_path):
    with pytest.raises(ConfigurationError, match="dataloader is a DataLoader") as refused:
        Checkpointer(tmp_path / "run", dataloader=Parts().loader)
    assert refused.value.hint == "loader=dataloader"


def test_a_place_that_is_a_file_is_refused_with_what_to_name(tmp_path):
    (tmp_path / "run").write_text("x")
    _, made = opened(tmp_path / "run")
    with pytest.raises(TierUnavailable, match="Not a directory") as refused:
        made.resume()
    assert "name a directory" in refused.value.hint
