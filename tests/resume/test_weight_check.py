"""A resumed run compares its weights with those of the run before it died."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.end_to_end.training import notice, record
from tests.limits import HANG_S
from trainckpt import Checkpointer
from trainckpt.format.attempt_record import AttemptRecord
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


class Counting(nn.Sequential):
    """Counts its calls in a plain attribute, and does nothing with the number."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def train(place, *, scale=lambda: 1.0, model=nn.Sequential, crash=False, stop=False):
    """Train 16 steps. The first attempt saves at step 4, and crashes at step 10 if told so, or
    stops with that save."""
    torch.manual_seed(0)
    model = model(nn.Linear(2, 3), nn.Linear(3, 1))
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


CHECKED = "checked: the sampled weights after step 5 equal those of attempt 1, bit for bit"


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


def test_equal_weights_are_reported_for_a_doubted_resume_too(tmp_path, caplog):
    crashed(tmp_path, model=Counting)
    with caplog.at_level("INFO", "trainckpt"):
        train(tmp_path, model=Counting)
    assert "this resume is same data, not bitwise: attributes" in caplog.text
    assert caplog.messages.count(CHECKED) == 1


def test_a_resume_from_a_stop_has_no_later_weights_to_compare(tmp_path, caplog):
    train(tmp_path, stop=True)
    with caplog.at_level("INFO", "trainckpt"):
        train(tmp_path)
    assert "this resume is bitwise in all that is tracked: model, optimizer, " in caplog.text
    assert "checked: " not in caplog.text


def test_weights_are_recorded_ever_farther_from_the_save(tmp_path):
    crashed(tmp_path)
    train(tmp_path)
    wait_for(lambda: "8" in record(tmp_path, 1)[FACT], "the second digest is not recorded")
    assert list(record(tmp_path, 1)[FACT]) == ["5", "8"]
    assert list(recorded_digests(LocalTier(tmp_path), 1, after_step=5)) == [8]


def test_a_record_with_other_contents_gives_no_digests(tmp_path):
    tier = LocalTier(tmp_path)
    assert recorded_digests(tier, 1, 0) == {}
    for table in ([1], {"x": "a", "-3": "b", "7": "c", "9" * 5000: "d"}):
        attempt_history.replace(tier, AttemptRecord(1, facts={FACT: table}))
        assert recorded_digests(tier, 1, 0) == ({7: "c"} if isinstance(table, dict) else {})


class Holder(nn.Module):
    """A module with these parameters and buffers."""

    def __init__(self, parameters, buffers=()):
        super().__init__()
        self.parameters_ = nn.ParameterList(parameters)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"b{number}", buffer, persistent=number > 0)


def test_the_digest_depends_on_each_trained_parameter_and_persistent_buffer():
    trained = [
        nn.Parameter(torch.ones(3, 2)),
        nn.Parameter(torch.ones((), dtype=torch.float64)),
        nn.Parameter(torch.ones(2, 5, dtype=torch.bfloat16).t()),
        nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.empty(0, 4)),
    ]
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    left_out, *buffers = [torch.ones(3), torch.ones(3), torch.ones(2, dtype=torch.bool)]
    model = Holder([*trained, frozen], [left_out, *buffers])
    seen = [weight_digest([model])]
    for tensor in (*trained, *buffers, frozen, left_out):
        with torch.no_grad():
            tensor.zero_()
        seen.append(weight_digest([model]))
    kept = [before == after for before, after in itertools.pairwise(seen)]
    assert kept == [False, False, False, False, True, False, False, True, True]
    assert weight_digest([Holder([frozen])]) == ""


def test_of_a_large_model_every_fourth_parameter_counts():
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(1000)]
    model = Holder(parameters)
    without, seen = weight_digest([model]), {}
    for changed in range(6):
        with torch.no_grad():
            parameters[changed][0] = 1
        seen[changed] = weight_digest([model])
        with torch.no_grad():
            parameters[changed][0] = 0
    assert [changed for changed, found in seen.items() if found != without] == [0, 4]
