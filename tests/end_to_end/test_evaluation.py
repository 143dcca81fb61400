"""Evaluations: entering one is a boundary; a resume from there repeats it, not the epoch."""

from __future__ import annotations

import random
import time

import pytest
import torch

from tests.end_to_end.training import ACCUMULATE, Crash, Parts, usable
from trainckpt import Checkpointer


def script(place, log, crash=None, save=(), epochs=3, evaluations=2):
    """Epochs, each with evaluations after it that draw from the generators and change state.

    Args:
        place: Of the run.
        log: Gets one line a micro-batch and one an evaluation.
        crash: Line number of the log to fail at.
        save: (epoch, evaluation) to ask for a save before.
        epochs: To train.
        evaluations: After each epoch.
    """
    parts = Parts()

    def note(*line):
        if len(log) == crash:
            raise Crash
        log.append(line)

    with Checkpointer(place, **parts.tracked(), every="never") as ckpt:
        for epoch in ckpt.epochs(epochs):
            for batch in ckpt.batches():
                at = ckpt.cursor
                note("train", at, *parts.train_on(batch, at.micro + 1 == ACCUMULATE))
            parts.scheduler.step()  # on the way to the evaluation: state changes
            for number in range(1, evaluations + 1):
                if (epoch, number) in save:
                    ckpt.save()
                    while not ckpt._gate.has_open_round():
                        time.sleep(0.001)
                with ckpt.evaluation():
                    with torch.no_grad():
                        value = parts.model(torch.randn(3, 4)).sum().item() + random.random()
                    rate = parts.scheduler.get_last_lr()
                    note("evaluate", epoch, number, value.hex(), rate)
                parts.scheduler.step()
    return parts


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The log and the end of a run that never stopped."""
    log = []
    parts = script(tmp_path_factory.mktemp("straight"), log)
    return log, parts.state()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("later", [0, 1, 2, 5])
def test_a_save_at_an_evaluation_s_entry_goes_on_there_exactly(tmp_path, straight, number, later):
    """The script's own scheduler.step() between epoch and evaluation is not done twice."""
    lines, end = straight
    first = next(i for i, line in enumerate(lines) if line[:3] == ("evaluate", 1, number))
    log = []
    with pytest.raises(Crash):
        script(tmp_path, log, crash=first + later, save=[(1, number)])
    assert len(usable(tmp_path)) == 1
    again = []
    parts = script(tmp_path, again)
    repeated = [line for line in again if line[:2] == ("evaluate", 1)]
    assert [line for line in again if line[0] == "train"] == [
        line for line in lines[first:] if line[0] == "train"
    ]
    assert again[-len(lines[first:]) :] == lines[first:]
    assert len(repeated) == 2  # (an evaluation before the saved one is repeated for nothing)
    assert parts.state() == end


def test_an_evaluation_in_the_middle_of_an_epoch_is_no_place_to_save_at(tmp_path):
    """What is due there is done when the next batch is asked for."""
    parts, saved_at = Parts(), []
    with Checkpointer(tmp_path, **parts.tracked(), every="never") as ckpt:
        for _ in ckpt.epochs(1):
            for batch in ckpt.batches():
                at = ckpt.cursor
                parts.train_on(batch, at.micro + 1 == ACCUMULATE)
                if at.micro_batches == 2:
                    pending = ckpt.save()
                    while not ckpt._gate.has_open_round():
                        time.sleep(0.001)
                    with ckpt.evaluation():
                        saved_at.append(pending.snapshot)
                elif at.micro_batches == 3:
                    saved_at.append(pending.snapshot)
    assert saved_at == [None, "s1m1~1.1"]


def test_an_epoch_after_an_evaluation_begins_with_its_first_batch(tmp_path, straight):
    """The save falls on the boundary that begins the epoch, after the evaluations."""
    lines, end = straight
    log = []
    begins = next(i for i, line in enumerate(lines) if line[0] == "train" and line[1].epoch == 2)
    with pytest.raises(Crash):
        script(tmp_path, log, crash=begins + 3, save=[(1, 2)])
    again = []
    parts = script(tmp_path, again)
    assert parts.state() == end
