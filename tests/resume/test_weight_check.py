"""A resumed run compares its weights with those of the run before it died."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.end_to_end.training import notice, record
from tests.limits import HANG_S
from trainckpt import Checkpointer
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.resume import weight_check
from trainckpt.resume.weight_check import FACT, recorded_digests, weight_digest
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

SAVED_AT, CRASHED_AT, LAST = 4, 10, 16


class Crash(Exception):
    pass


class ScaleInAFile:
    """A number that halves with each step, kept in a file: nothing tracks it or compares it."""

    def __init__(self, file):
        self.file = file
        file.write_text("1.0")

    def __call__(self):
        scale = float(self.file.read_text())
        self.file.write_text(str(scale / 2))
        return scale


def train(place, *, scale=lambda: 1.0, crash=False, stop=False):
    """Train 16 steps. The first attempt saves at step 4, and crashes at step 10 if told so, or
    stops with that save."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    loader = DataLoader(torch.arange(64.0).view(32, 2) / 64, batch_size=2, shuffle=True)
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    with Checkpointer(place, **tracked, every="never", on_stop="return") as ckpt:
        for batch in ckpt.batches():
            (model(batch) * scale()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if ckpt.attempt == 1 and ckpt.cursor.step == SAVED_AT:
                if stop:
                    notice(place, 1, action="stop")
                    wait_for(lambda: ckpt._gate.has_open_round(), "the notice was not read")
                else:
                    ckpt.save()
            if crash and ckpt.cursor.step == CRASHED_AT:
                wait_for(lambda: FACT in record(place, 1), "the record has no digest")
                raise Crash


def wait_for(condition, otherwise):
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, otherwise
        time.sleep(0.01)


def crashed(place, **how):
    with pytest.raises(Crash):
        train(place, crash=True, **how)


CHECKED = "checked: the weights after step 5 equal those of attempt 1, bit for bit"


def test_an_exact_resume_is_confirmed_by_the_weights_one_step_later(tmp_path, caplog):
    crashed(tmp_path)
    with caplog.at_level("INFO", "trainckpt"):
        train(tmp_path)
    assert caplog.messages.count(CHECKED) == 1
    assert "not exact" not in caplog.text
    assert record(tmp_path, 2)["outcome"]["exactness"] == "bitwise"


def test_state_that_nothing_else_finds_is_seen_in_the_weights(tmp_path, caplog):
    scale = ScaleInAFile(tmp_path / "scale")
    crashed(tmp_path / "run", scale=scale)
    with caplog.at_level("INFO", "trainckpt"):
        train(tmp_path / "run", scale=scale)
    said = [line for line in caplog.messages if line.startswith("not exact: ")]
    assert len(said) == 1
    assert "after step 5 the weights are not those that attempt 1 had there" in said[0]
    assert "this resume is same data, not bitwise: weights (reported before: bitwise)" in (
        caplog.text
    )
    assert "checked: " not in caplog.text
    assert record(tmp_path / "run", 2)["outcome"]["exactness"] == "same data, not bitwise"


def test_a_resume_from_a_stop_has_no_later_weights_to_compare(tmp_path, caplog):
    train(tmp_path, stop=True)
    with caplog.at_level("INFO", "trainckpt"):
        train(tmp_path)
    assert "this resume is bitwise in all that is tracked: model, optimizer, " in caplog.text
    assert "checked: " not in caplog.text


def test_weights_are_recorded_ever_farther_from_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_check, "_PACE_S", 0.0)
    crashed(tmp_path)
    train(tmp_path)
    wait_for(lambda: "8" in record(tmp_path, 1)[FACT], "the second digest is not recorded")
    assert list(record(tmp_path, 1)[FACT]) == ["5", "8"]
    assert list(recorded_digests(LocalTier(tmp_path), 1, after_step=5)) == [8]


def test_a_record_with_other_contents_gives_no_digests(tmp_path):
    tier = LocalTier(tmp_path)
    assert recorded_digests(tier, 1, 0) == {}
    for table in ([1], {"x": "a", "-3": "b", "7": "c"}):
        attempt_history.replace(tier, AttemptRecord(1, facts={FACT: table}))
        assert recorded_digests(tier, 1, 0) == ({7: "c"} if isinstance(table, dict) else {})


def test_the_digest_depends_on_every_kind_of_trained_parameter():
    parameters = [
        nn.Parameter(torch.ones(3, 2)),
        nn.Parameter(torch.ones((), dtype=torch.float64)),
        nn.Parameter(torch.ones(2, 5, dtype=torch.bfloat16).t()),
        nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.empty(0, 4)),
    ]
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    seen = {weight_digest([*parameters, frozen])}
    for parameter in parameters[:-1]:
        with torch.no_grad():
            parameter.view(-1)[0].add_(1) if parameter.is_contiguous() else parameter.add_(1)
        seen.add(weight_digest([*parameters, frozen]))
    with torch.no_grad():
        frozen.add_(1)
    assert weight_digest([*parameters, frozen]) in seen
    assert len(seen) == len(parameters)
    assert weight_digest([frozen]) == ""


def test_of_a_large_model_every_fourth_parameter_counts():
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(1000)]
    seen = {}
    for changed in range(6):
        with torch.no_grad():
            parameters[changed][0] = 1
        seen[changed] = weight_digest(parameters)
        with torch.no_grad():
            parameters[changed][0] = 0
    without = weight_digest(parameters)
    assert [changed for changed, found in seen.items() if found != without] == [0, 4]
