"""The recipes of docs/trackers.md: each step once in the tracker, with the value that counts."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.end_to_end.training import ACCUMULATE, Crash, Parts
from trainckpt import Checkpointer

MICRO_BATCHES = 10
CRASHES = (3, 6, 9)  # with saves after 2 steps, which are 4 micro-batches: after 0, 4 and 8


class Refuses:
    """A tracker that takes no step twice, as W&B."""

    def __init__(self):
        self.values = {}

    @property
    def last(self):
        return max(self.values, default=-1)

    def log(self, at, value):
        assert at > self.last, f"step {at} is not newer than {self.last}"
        self.values[at] = value


def train(place, open_log, crash_at=None):
    """One attempt; `open_log` gets the cursor and returns what logs a value."""
    parts = Parts()
    with Checkpointer(place, **parts.tracked(), every="2 steps") as ckpt:
        log = open_log(ckpt.cursor)
        for _ in ckpt.epochs(2):
            for batch in ckpt.batches():
                cursor = ckpt.cursor
                at = cursor.micro_batches
                if at == crash_at:
                    raise Crash
                _, loss = parts.train_on(batch, cursor.micro + 1 == ACCUMULATE)
                log(at, float.fromhex(loss))


@pytest.fixture
def straight(tmp_path):
    values = {}
    train(tmp_path / "straight", lambda cursor: values.__setitem__)
    return values


def attempts(place, open_log):
    for at in CRASHES:
        with pytest.raises(Crash):
            train(place, open_log, crash_at=at)
    train(place, open_log)


def test_tensorboard_has_each_step_once_after_three_kills(tmp_path, straight):
    writers = []

    def open_log(cursor):
        writers.append(SummaryWriter(tmp_path / "logs", purge_step=cursor.micro_batches))
        return lambda at, value: writers[-1].add_scalar("loss", value, at)

    attempts(tmp_path / "run", open_log)
    for writer in writers:  # the killed ones have flushed what they logged
        writer.close()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    assert [at for at, _ in logged] == list(range(MICRO_BATCHES))
    assert dict(logged) == pytest.approx(straight)


def test_a_tracker_that_refuses_older_steps_has_each_once_after_three_kills(tmp_path, straight):
    tracker = Refuses()

    def open_log(cursor):
        return lambda at, value: at > tracker.last and tracker.log(at, value)

    attempts(tmp_path / "run", open_log)
    assert tracker.values == straight
