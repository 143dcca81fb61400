"""Damaged, swapped, missing and hostile files are refused with a reason, the next older is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.end_to_end.training import Parts, attempt, crashed, record, usable
from trainckpt import Checkpointer
from trainckpt.errors import NoUsableSnapshot, StateMismatch, TierUnavailable, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE


@pytest.fixture(autouse=True)
def only_on_disk(monkeypatch):
    """Else the resume reads what is good from memory."""
    monkeypatch.setenv(ROOT_VARIABLE, NONE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with two snapshots, s2~1.1 and s4~1.2, that crashed then."""
    place = tmp_path_factory.mktemp("saved") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROOT_VARIABLE, NONE)
        crashed(place, 9, epochs=3)
    assert usable(place) == ["s2~1.1", "s4~1.2"]
    return place


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def file(run, snapshot, name="rank00000.safetensors"):
    return run / "snapshots" / snapshot / name


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def resumed(run, caplog=None):
    """Where the next attempt goes on from, and why not from a newer one."""
    with Checkpointer(run, **Parts().tracked()) as ckpt:
        began = ckpt.resumed_from
        refused = dict(ckpt._attempt.beginning.refused or {})
        assert ckpt.cursor == began
        raise_if_none(began)
        return began.step, refused


def raise_if_none(cursor):
    assert cursor is not None, "it silently began at step 0"


def header_bytes(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


DAMAGE = {
    "a bit of the data": lambda run: flip(file(run, "s4~1.2"), -9),
    "the first bit of the data": lambda run: flip(
        file(run, "s4~1.2"), header_bytes(file(run, "s4~1.2"))
    ),
    "a bit of the header": lambda run: flip(file(run, "s4~1.2"), 40),
    "the length of the header": lambda run: flip(file(run, "s4~1.2"), 1),
    "the padding of the header": lambda run: flip(
        file(run, "s4~1.2"), header_bytes(file(run, "s4~1.2")) - 1
    ),
    "a bit of the manifest": lambda run: flip(file(run, "s4~1.2", "manifest.json"), 100),
    "the end of a file": lambda run: file(run, "s4~1.2").write_bytes(
        file(run, "s4~1.2").read_bytes()[:-1]
    ),
    "bytes too many": lambda run: file(run, "s4~1.2").write_bytes(
        file(run, "s4~1.2").read_bytes() + b"x"
    ),
    "the end of the manifest": lambda run: file(run, "s4~1.2", "manifest.json").write_bytes(
        file(run, "s4~1.2", "manifest.json").read_bytes()[:-1]
    ),
    "an empty manifest": lambda run: file(run, "s4~1.2", "manifest.json").write_bytes(b""),
    "a whole file": lambda run: file(run, "s4~1.2").unlink(),
    "a file of another snapshot": lambda run: file(run, "s4~1.2").write_bytes(
        file(run, "s2~1.1").read_bytes()
    ),
    "a manifest of another snapshot": lambda run: file(run, "s4~1.2", "manifest.json").write_bytes(
        file(run, "s2~1.1", "manifest.json").read_bytes()
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_the_next_older_snapshot_is_used_and_the_refusal_logged(run, what, caplog):
    DAMAGE[what](run)
    with caplog.at_level("INFO", "trainckpt"):
        step, refused = resumed(run)
    assert (step, list(refused)) == (2, ["s4~1.2"])
    assert f"skipped snapshot s4~1.2: {refused['s4~1.2']}" in caplog.text
    assert usable(run)[0] == "s2~1.1"


def test_a_missing_manifest_is_an_interrupted_save(run):
    """Its commit is recorded, so it is not taken for garbage without a word."""
    file(run, "s4~1.2", "manifest.json").unlink()
    step, refused = resumed(run)
    assert (step, refused) == (2, {"s4~1.2": "not committed: its save was interrupted"})


def test_a_vanished_snapshot_that_was_recorded_is_said_to_be_gone(run, caplog):
    for path in (file(run, "s4~1.2"), file(run, "s4~1.2", "manifest.json")):
        path.unlink()
    (run / "snapshots" / "s4~1.2").rmdir()
    step, refused = resumed(run)
    assert (step, refused) == (2, {"s4~1.2": "attempt 1 committed it, but it is missing"})


@pytest.mark.parametrize("damage", [DAMAGE["a bit of the data"], DAMAGE["a whole file"]])
def test_if_all_are_damaged_it_never_begins_at_step_0(run, damage):
    damage(run)
    flip(file(run, "s2~1.1"), -9)
    parts = Parts()
    before = parts.model[0].weight.clone()
    with pytest.raises(NoUsableSnapshot) as caught:
        Checkpointer(run, **parts.tracked()).resume()
    assert caught.value.exit_code == 65
    assert list(caught.value.refused) == ["s4~1.2", "s2~1.1"]
    assert torch.equal(parts.model[0].weight, before)


def test_if_all_are_gone_it_never_begins_at_step_0(run):
    for folder in list((run / "snapshots").iterdir()):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    with pytest.raises(NoUsableSnapshot, match="it is missing"):
        Checkpointer(run, **Parts().tracked()).resume()


@pytest.mark.parametrize(
    "act", [lambda p: flip(p, 12), lambda p: p.write_bytes(b""), lambda p: p.unlink()]
)
def test_a_damaged_run_s_record_is_an_error_and_changes_nothing(run, act):
    data = (run / "run.json").read_bytes()
    act(run / "run.json")
    listing = sorted(run.rglob("*"))
    with pytest.raises(UnusableSnapshot) as caught:
        Checkpointer(run, **Parts().tracked()).resume()
    assert caught.value.exit_code == 65
    assert sorted(run.rglob("*")) == listing
    (run / "run.json").write_bytes(data)
    assert resumed(run)[0] == 4


@pytest.mark.parametrize("at", [10, 60, -3])
def test_a_damaged_attempt_s_record_is_named_and_the_snapshots_are_used(run, at, caplog):
    flip(run / "attempts" / "1.json", at)
    with caplog.at_level("WARNING", "trainckpt"):
        assert resumed(run)[0] == 4
    assert "the record of attempt 1 is damaged" in caplog.text


def test_a_snapshot_of_another_run_is_refused(run, tmp_path):
    crashed(tmp_path / "other", 9, epochs=3)
    for name in ("manifest.json", "rank00000.safetensors"):
        file(run, "s4~1.2", name).write_bytes(file(tmp_path / "other", "s4~1.2", name).read_bytes())
    step, refused = resumed(run)
    assert step == 2
    assert "belongs to another run" in refused["s4~1.2"]


def rewritten(run, **changes):
    """Change the newest manifest, and make its own digest fit."""
    path = file(run, "s4~1.2", "manifest.json")
    path.write_bytes(json_io.with_digest({**json.loads(path.read_bytes()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 6}, "format version 6"),
        (
            {
                "format": 1,
                "files": [
                    {"name": "../s2~1.1/x", "bytes": 1, "digest": "0" * 32, "header": "0" * 32}
                ],
            },
            "outside its folder",
        ),
        (
            {"world": 0, "files": {"bytes": [], "digests": "", "headers": ""}},
            "names 0 files for 0 ranks",
        ),
        (
            {"layouts": [{"mesh": [3], "strides": [1], "base": 0, "dims": [-1], "order": [0]}]},
            "is no mesh of 1 ranks",
        ),
        ({"tensors": {}}, "is not in the manifest"),
    ],
)
def test_a_hostile_manifest_is_refused_with_the_reason(run, changes, words):
    rewritten(run, **changes)
    step, refused = resumed(run)
    assert step == 2
    assert words in refused["s4~1.2"]


def test_a_changed_script_is_told_every_difference_and_loses_nothing(run):
    parts = Parts(width=5)
    parts.scaler = torch.amp.GradScaler("cpu")
    before = parts.model[0].weight.clone()
    with pytest.raises(StateMismatch) as caught:
        Checkpointer(run, **parts.tracked()).resume()
    text = "\n".join(caught.value.differences)
    assert "scaler is tracked now, and not in the snapshot" in text
    assert "model/0.weight has shape [4, 4] in the snapshot, [5, 4] now" in text
    assert "model/1.running_var has shape [4] in the snapshot, [5] now" in text
    assert caught.value.exit_code == 78
    assert torch.equal(parts.model[0].weight, before)
    assert resumed(run)[0] == 4


def test_another_number_of_loader_workers_is_refused(run):
    parts = Parts()
    parts.loader = torch.utils.data.DataLoader(parts.loader.dataset, 2, shuffle=True, num_workers=2)
    with pytest.raises(StateMismatch, match="worker"):
        Checkpointer(run, **parts.tracked()).resume()
    assert resumed(run)[0] == 4


def test_a_parameter_less_and_another_optimizer_are_refused_at_once(run):
    parts = Parts()
    parts.model = nn.Sequential(*parts.model, nn.Linear(1, 1))
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), 0.1)
    parts.scheduler = torch.optim.lr_scheduler.ExponentialLR(parts.optimizer, 0.9)
    with pytest.raises(StateMismatch) as caught:
        Checkpointer(run, **parts.tracked()).resume()
    assert "optimizer was a AdamW, is a SGD" in caught.value.differences
    assert "model/4.bias is new: the snapshot has no such tensor" in caught.value.differences


def test_a_place_that_is_a_file_is_an_error_and_no_empty_run(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises((TierUnavailable, UnusableSnapshot)):
        attempt(tmp_path / "run")
    assert (tmp_path / "run").read_text() == ""


def test_a_refused_resume_is_an_attempt_that_left_its_record(run):
    with pytest.raises(StateMismatch):
        Checkpointer(run, **Parts(width=5).tracked()).resume()
    assert record(run, 2)["parent"] == "undecided"
    assert resumed(run)[0] == 4
