"""A run that cannot save is told so as soon as that shows, not when all is trained."""

from __future__ import annotations

import errno
import logging
import os

import pytest
import torch

from tests.end_to_end.training import Parts, attempt, crashed, record, usable
from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError, SaveFailed
from trainckpt.save import checks
from trainckpt.storage.local import LocalTier, translated


class KeepsAFunction(torch.optim.SGD):
    """Its state can be stored until it has made a step."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["callback"] = print


def test_state_that_a_step_makes_and_nobody_can_store_is_refused_after_that_step(tmp_path):
    parts = Parts()
    parts.optimizer = KeepsAFunction(parts.model.parameters(), lr=0.1)
    parts.scheduler = torch.optim.lr_scheduler.ExponentialLR(parts.optimizer, 0.9)
    seen = {}
    with pytest.raises(
        ConfigurationError, match=r"optimizer/model/0\.weight/callback is a builtin"
    ):
        attempt(tmp_path, parts=parts, seen=seen, every="10 min")
    assert sorted(seen) == [0, 1]  # one window


class Closed:
    """Its state cannot be had once it is closed."""

    closed = False

    def state_dict(self):
        if self.closed:
            raise RuntimeError("it is closed")
        return {}

    def load_state_dict(self, state):
        pass


def test_an_object_whose_state_cannot_be_had_is_refused_before_the_first_batch(tmp_path):
    """It could when the Checkpointer was made."""
    parts, tracker = Parts(), Closed()
    with Checkpointer(tmp_path, **parts.tracked(), tracker=tracker) as ckpt:
        tracker.closed = True
        with pytest.raises(ConfigurationError, match="the state of tracker cannot be saved: Run"):
            next(iter(ckpt.batches()))
    assert record(tmp_path, 1)["outcome"]["outcome"] == "failed"


@pytest.fixture
def is_full(monkeypatch):
    """The run's place is full, as long as the set that is returned holds something."""
    full = {True}
    write = LocalTier.write_parts

    def refuse(tier, *arguments, **keywords):
        if full:
            with translated("write", tier.root):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(tier, *arguments, **keywords)

    monkeypatch.setattr(LocalTier, "write_parts", refuse)
    return full


def failures(caplog):
    return [(r.levelname, r.getMessage()) for r in caplog.records if " failed, " in r.getMessage()]


def test_saves_that_fail_in_a_row_say_what_a_stop_would_lose(tmp_path, caplog, is_full):
    caplog.set_level(logging.WARNING, "trainckpt")
    with pytest.raises(SaveFailed):
        attempt(tmp_path)
    first, second, *_ = failures(caplog)
    assert first[0] == "WARNING"
    assert "; next: free space on the file system of" in first[1]
    assert second[0] == "ERROR"
    assert "failed, as did 1 before it: a stop now loses all training since step 0" in second[1]


def test_they_name_the_newest_checkpoint_that_there_is(tmp_path, caplog, is_full):
    """After one that succeeds, the next failure is a first one again."""
    caplog.set_level(logging.WARNING, "trainckpt")
    is_full.clear()
    crashed(tmp_path, 5)
    (newest,) = usable(tmp_path)
    is_full.add(True)
    with pytest.raises(SaveFailed):
        attempt(tmp_path)
    assert f"loses all training since {newest}. " in failures(caplog)[1][1]


def test_a_place_without_room_for_one_checkpoint_is_named_at_the_start(
    tmp_path, caplog, monkeypatch
):
    """And again after the first step, which makes the optimizer's state."""
    monkeypatch.setattr(checks, "free_bytes", lambda _: 100)
    caplog.set_level(logging.ERROR, "trainckpt")
    attempt(tmp_path, epochs=1)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("unless space is freed, nothing can be saved there" in text for text in said)


def test_a_full_place_at_the_commit_leaves_the_one_before_for_two_resumes(tmp_path, monkeypatch):
    """Shard files fit, the small file behind them does not; then the same steps are saved again."""
    straight = {}
    attempt(tmp_path / "straight", seen=straight)
    seen, full = {}, {True}
    replace = LocalTier.replace

    def refuse(tier, key, data):
        if full and key.endswith("manifest.json") and usable(tmp_path / "run"):
            with translated("write", tier.root / key):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        replace(tier, key, data)

    monkeypatch.setattr(LocalTier, "replace", refuse)
    for _ in range(2):
        crashed(tmp_path / "run", 9, seen=seen, every="1 steps")
        assert len(usable(tmp_path / "run")) == 1
    full.clear()
    attempt(tmp_path / "run", seen=seen, every="1 steps")
    assert all(line == straight[at][0] for at, lines in seen.items() for line in lines)
    assert [len(seen[at]) for at in (0, 2, 8)] == [1, 3, 3]
