"""A place that is behind its slower tier: a host's own disk, a backup, a copy of a run."""

from __future__ import annotations

import logging
import shutil

import pytest

from tests.end_to_end import lora
from tests.end_to_end.training import attempt, crashed, record, usable
from tests.ranks.processes import preload, run_ranks
from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.resume import resume
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

preload("tests.end_to_end.lora")

EPOCHS = 6


def durable(ckpt, _):
    """Whatever is saved is in the tier too, before training goes on."""
    saved = ckpt._attempt.saver.in_flight
    if saved is not None:
        saved.wait("durable")


def train(folder, crash_at=None, run="run", **options):
    how = {"epochs": EPOCHS, "tiers": [folder / "far"], "inside": durable, "keep_last": 2}
    how |= options
    try:
        if crash_at is not None:
            return crashed(folder / run, crash_at, **how)
        return attempt(folder / run, **how)
    finally:
        SharedMemoryDir.of(str(folder / run)).remove()


def files(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The end of the run that never stopped."""
    parts, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=EPOCHS)
    return parts.state()


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory):
    """Two hosts' disks: `a` is that of the attempt 1, `run`, at the same path, that of 2."""
    folder = tmp_path_factory.mktemp("gone on")
    train(folder, 9)
    (folder / "run").rename(folder / "a")
    train(folder, 17)
    assert (folder / "run/attempts/2.json").exists()
    return folder


@pytest.fixture
def hosts(gone_on, tmp_path):
    """The same, moved here."""
    for name in ("a", "run", "far"):
        shutil.copytree(gone_on / name, tmp_path / name)
        for path in (tmp_path / name).glob("attempts/*.json"):
            found = AttemptRecord.load(path.read_bytes(), path.name)
            tiers = [{"name": "far", "url": str(tmp_path / "far")}]
            facts = {**found.facts, "where": str(tmp_path / "run"), "tiers": tiers}
            path.write_bytes(found.with_(facts=facts).dump())
    return tmp_path


def back_on_a(folder):
    (folder / "run").rename(folder / "b")
    (folder / "a").rename(folder / "run")


def test_a_host_s_disk_that_was_behind_takes_no_number_twice_and_the_run_goes_on(
    hosts, straight, caplog
):
    second, newest = record(hosts / "far", 2), usable(hosts / "far")[-1]
    back_on_a(hosts)
    train(hosts, 21)
    assert "was behind: the tier far told it of the attempts 2" in caplog.text
    assert record(hosts / "run", 3)["parent"] == newest
    assert record(hosts / "run", 2)["started"] == second["started"]
    assert record(hosts / "far", 2) == second
    assert usable(hosts / "far")[-1].partition("~")[2].startswith("3.")
    (hosts / "run").rename(hosts / "a")
    (hosts / "b").rename(hosts / "run")
    parts, ckpt = train(hosts)
    assert ckpt.attempt == 4
    assert parts.state() == straight


def test_a_new_start_from_nothing_on_such_a_disk_takes_the_next_number_too(hosts):
    back_on_a(hosts)
    _, ckpt = train(hosts, resume="never")
    assert ckpt.attempt == 3
    assert record(hosts / "run", 3)["parent"] is None


def test_a_copy_of_the_run_s_place_does_not_go_on_with_its_tier_unless_that_is_meant(hosts):
    (hosts / "a").rename(hosts / "copy")
    before = files(hosts / "copy"), files(hosts / "far")
    with pytest.raises(ConfigurationError, match="one of the two is a copy") as refused:
        train(hosts, run="copy")
    assert refused.value.exit_code == 78
    assert "name other tiers" in refused.value.hint
    assert (files(hosts / "copy"), files(hosts / "far")) == before
    _, ckpt = train(hosts, run="copy", tiers=[hosts / "other"])
    assert ckpt.attempt == 2
    assert record(hosts / "copy", 2)["parent"].partition("~")[2].startswith("1.")
    assert files(hosts / "far") == before[1]


def test_two_places_that_both_saved_an_attempt_of_one_number_are_refused(hosts, caplog):
    back_on_a(hosts)
    (hosts / "far").rename(hosts / "away")
    (hosts / "far").write_text("")  # it does not answer
    train(hosts, 13, accept_older=True, inside=None)
    (hosts / "far").unlink()
    (hosts / "away").rename(hosts / "far")
    before = files(hosts / "run"), files(hosts / "far")
    with pytest.raises(
        ConfigurationError, match=r"attempt 2 in .* differs from attempt 2 in the tier far"
    ):
        train(hosts)
    assert (files(hosts / "run"), files(hosts / "far")) == before
    caplog.clear()
    train(hosts, tiers=[hosts / "other"], inside=None)
    assert "the tier far is left out: attempt 2" in caplog.text
    assert record(hosts / "run", 3)["parent"].partition("~")[2].startswith("2.")
    assert files(hosts / "far") == before[1]


def test_a_tier_that_comes_back_with_another_attempt_of_this_number_is_not_written_to(
    hosts, caplog
):
    """It did not answer when the attempt began."""
    back_on_a(hosts)
    (hosts / "far").rename(hosts / "away")
    (hosts / "far").write_text("")
    before = {path.name: path.read_bytes() for path in (hosts / "away").rglob("*.json")}

    def back(ckpt, _):
        if ckpt.cursor.micro_batches == 12:
            (hosts / "far").unlink()
            (hosts / "away").rename(hosts / "far")

    with caplog.at_level(logging.WARNING, "trainckpt"):
        train(hosts, accept_older=True, inside=back)
    assert {path.name: path.read_bytes() for path in (hosts / "far").rglob("*.json")} == before
    assert record(hosts / "run", 2)["outcome"]["tiers"] == ["local"]


def test_attempts_that_failed_before_they_saved_do_not_hide_what_another_host_s_saved(hosts):
    back_on_a(hosts)
    parent, newest = usable(hosts / "run")[-1], usable(hosts / "far")[-1]
    for _ in range(2):
        attempt_history.claim(
            LocalTier(hosts / "run"), lambda n: AttemptRecord(n, parent, facts={"started": n + 0.5})
        )
    _, ckpt = train(hosts)
    assert ckpt.attempt == 4
    assert record(hosts / "run", 4)["parent"] == newest


def test_a_start_that_finds_what_a_later_attempt_saved_says_so_and_does_not_descend_from_it(
    tmp_path, monkeypatch
):
    """Another start claimed the next number and saved, while this one was slow to look."""
    train(tmp_path, 9, tiers=[], inside=None)
    train(tmp_path, 13, tiers=[], inside=None)
    late = AttemptRecord(2, facts={"started": 1.0})
    monkeypatch.setattr(resume.attempt_records, "claim", lambda *_: late)
    with pytest.raises(UnusableSnapshot, match="another start of the run has continued meanwhile"):
        train(tmp_path, tiers=[], inside=None)


def test_all_ranks_go_on_from_what_the_tier_knows(tmp_path):
    tiers, run = [str(tmp_path / "far")], tmp_path / "run"
    run_ranks(lora.train_in_tiers, 2, run, 2, 2, tiers)
    shutil.copytree(run, tmp_path / "a")
    run_ranks(lora.train_in_tiers, 2, run, 2, 4, tiers)
    newest = usable(tmp_path / "far")[-1]
    shutil.rmtree(run)
    (tmp_path / "a").rename(run)
    SharedMemoryDir.of(str(run)).remove()
    run_ranks(lora.train_in_tiers, 2, run, 2, 6, tiers)
    assert record(run, 3)["parent"] == newest
