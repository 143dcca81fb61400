"""The ladder of a resume: each file from the nearest good copy; no tier missed without a word."""

from __future__ import annotations

import json
import logging
import shutil
import time

import pytest

from tests.end_to_end import lora
from tests.end_to_end.training import attempt, crashed, record, usable
from tests.faults.test_bad_bytes import flip
from tests.limits import HANG_S
from tests.long_cases import long
from tests.ranks.processes import preload, run_ranks
from trainckpt.errors import ConfigurationError, TierUnavailable
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

preload("tests.end_to_end.lora")

CRASH_AT = 9


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The end of the run that never stopped."""
    parts, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=3)
    return parts.state()


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """A run that crashed, all of whose snapshots are in two slower tiers."""
    folder = tmp_path_factory.mktemp("tiered")

    tiers = [folder / "near", folder / "far"]

    def committed(place):
        return {path.parent.name for path in place.glob("snapshots/*/manifest.json")}

    def durable(ckpt, _):
        saved = ckpt._attempt.saver.in_flight
        if saved is not None:
            saved.wait("durable")
        ends_s = time.monotonic() + HANG_S  # a save that is over here may still be on its way there
        while any(committed(folder / "run") - committed(tier) for tier in tiers):
            assert time.monotonic() < ends_s
            time.sleep(0.01)

    crashed(folder / "run", CRASH_AT, epochs=3, tiers=tiers, inside=durable)
    assert usable(folder / "run") == usable(folder / "near") == usable(folder / "far")
    SharedMemoryDir.of(str(folder / "run")).remove()
    return folder


@pytest.fixture
def run(tiered, tmp_path):
    """A copy of it, whose records know of no other; what to resume it with."""
    for name in ("run", "near", "far"):
        shutil.copytree(tiered / name, tmp_path / name)
        path = tmp_path / name / "attempts/1.json"
        told = json.loads(path.read_text())
        del told["digest"]
        told["where"] = str(tmp_path / "run")
        for tier in told["tiers"]:
            tier["url"] = str(tmp_path / tier["name"])
        path.write_text(json.dumps(told))
    return tmp_path


def in_order(folder, *names):
    return {"epochs": 3, "tiers": [folder / name for name in names]}


def file_in(place, snapshot):
    return next((place / "snapshots" / snapshot).glob("*.safetensors"))


def begun_from(ckpt):
    return str(ckpt._attempt.beginning.manifest.name)


@pytest.mark.parametrize(
    ("bad", "order"),
    [
        (1, ("near", "far")),
        (2, ("far", "near")),
        (3, ("near", "far")),
        *long((1, ("far", "near")), (2, ("near", "far")), (3, ("far", "near"))),
    ],
    ids=str,
)
def test_one_bit_flipped_in_so_many_copies_and_the_next_is_used(run, straight, caplog, order, bad):
    places, newest = ["run", *order], usable(run / "run")[-1]
    older = usable(run / "run")[-2]
    for number, name in enumerate(places[:bad]):
        flip(file_in(run / name, newest), [20, 5000, -1][number])
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, ckpt = attempt(run / "run", **in_order(run, *order))
    assert parts.state() == straight
    if bad < 3:
        assert begun_from(ckpt) == newest
        assert f"{newest} was read from {order[bad - 1]}" in caplog.text
    else:
        assert begun_from(ckpt) == older
    for name in places[:bad]:
        called = "local" if name == "run" else name
        assert f"snapshots/{newest}/rank00000.safetensors in {called}: " in caplog.text


def test_a_run_goes_on_from_a_tier_when_its_place_is_gone_and_has_its_records_again(run, straight):
    newest = usable(run / "near")[-1]
    shutil.rmtree(run / "run")
    parts, ckpt = attempt(run / "run", **in_order(run, "near", "far"))
    assert begun_from(ckpt) == newest
    assert parts.state() == straight
    assert record(run / "run", 1)["attempt"] == 1
    assert record(run / "run", 2)["parent"] == newest
    assert record(run / "near", 2)["outcome"]["outcome"] == "finished"


def test_an_empty_place_does_not_go_on_with_another_run_s_tiers_unless_that_is_meant(run, straight):
    """Tiers that were mistyped, or copied from another script."""
    options = in_order(run, "near", "far")
    before = record(run / "near", 1)
    for mode in ("auto", "never"):
        with pytest.raises(ConfigurationError, match="the tier near holds that of") as caught:
            attempt(run / "other", resume=mode, **options)
        assert "resume='required'" in caught.value.hint
    assert not (run / "other/attempts").exists()
    assert record(run / "near", 1) == before
    parts, _ = attempt(run / "other", resume="required", **options)
    assert parts.state() == straight


def test_a_tier_that_only_the_record_names_is_read_too(run, straight):
    newest = usable(run / "run")[-1]
    shutil.rmtree(run / "run/snapshots")
    (run / "run/snapshots").mkdir()
    parts, ckpt = attempt(run / "run", epochs=3)
    assert begun_from(ckpt) == newest
    assert parts.state() == straight


def test_half_of_a_snapshot_in_each_tier_is_a_whole_one(tmp_path):
    tiers = [str(tmp_path / "far")]
    straight = run_ranks(lora.train, 2, tmp_path / "straight", 2, 4)
    run_ranks(lora.train_in_tiers, 2, tmp_path / "run", 2, 2, tiers)
    newest = usable(tmp_path / "run")[-1]
    SharedMemoryDir.of(str(tmp_path / "run")).remove()
    (tmp_path / "run/snapshots" / newest / "rank00000.safetensors").unlink()
    flip(tmp_path / "far/snapshots" / newest / "rank00001.safetensors", -1)
    flip(tmp_path / "far/snapshots" / newest / "manifest.json", 20)
    then = run_ranks(lora.train_in_tiers, 2, tmp_path / "run", 2, 4, tiers)
    assert record(tmp_path / "run", 2)["parent"] == newest
    assert [{**s, **t} for s, t in zip(straight, then, strict=True)] == straight


def test_a_silent_tier_that_holds_a_newer_snapshot_is_not_missed_unless_that_is_accepted(run):
    newest, older = usable(run / "run")[-1], usable(run / "run")[-2]
    for name in ("run", "near"):
        shutil.rmtree(run / name / "snapshots" / newest)
    shutil.rmtree(run / "far")
    (run / "far").write_text("")
    with pytest.raises(TierUnavailable, match=f"the tier far holds {newest}") as refused:
        attempt(run / "run", **in_order(run, "near", "far"))
    assert refused.value.hint.startswith("name a directory: a file lies at this path")
    assert "--accept-older" in refused.value.hint
    assert record(run / "run", 2)["outcome"]["exit_code"] == 69
    _, ckpt = attempt(run / "run", **in_order(run, "near", "far"), accept_older=True)
    assert begun_from(ckpt) == older


def test_a_silent_tier_with_nothing_newer_is_left_out_and_said(run, straight, caplog):
    shutil.rmtree(run / "far")
    (run / "far").write_text("")
    parts, _ = attempt(run / "run", **in_order(run, "near", "far"))
    assert parts.state() == straight
    assert "the tier far is left out" in caplog.text


def test_a_tier_that_denies_one_of_its_snapshots_is_left_out_and_said(
    run, straight, caplog, monkeypatch
):
    """Such as one that another user has copied there."""
    read, newest = LocalTier.read, usable(run / "run")[-1]

    def denied(tier, key, *, max_bytes):
        if tier.root == run / "far" and key.startswith(f"snapshots/{newest}/"):
            raise TierUnavailable(f"cannot read {tier.root}/{key}: Permission denied")
        return read(tier, key, max_bytes=max_bytes)

    monkeypatch.setattr(LocalTier, "read", denied)
    parts, _ = attempt(run / "run", **in_order(run, "near", "far"))
    assert parts.state() == straight
    assert "the tier far is left out: cannot read" in caplog.text


def test_an_empty_place_with_a_silent_tier_begins_nothing(run):
    shutil.rmtree(run / "run")
    for name in ("near", "far"):
        shutil.rmtree(run / name)
        (run / name).write_text("")
    with pytest.raises(TierUnavailable, match="holds no run, and whether a slower tier does") as no:
        attempt(run / "run", **in_order(run, "near", "far"))
    assert no.value.hint.startswith("name a directory: a file lies at this path, or above it; or a")
    assert not (run / "run").exists()


def test_tiers_of_two_runs_are_refused(run, tmp_path):
    attempt(tmp_path / "other", epochs=1)
    shutil.rmtree(run / "run")
    with pytest.raises(ConfigurationError, match="several runs"):
        attempt(run / "run", epochs=3, tiers=[run / "near", tmp_path / "other"])
