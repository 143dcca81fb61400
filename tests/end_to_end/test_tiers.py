"""Slower tiers: copied to behind training, committed there last; the save waits for them only
where somebody asks."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from pathlib import Path

import pytest

from tests.end_to_end import lora
from tests.end_to_end.training import Parts, attempt, catalog, crashed, record, usable
from tests.ranks.processes import preload, run_ranks
from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError, SaveFailed
from trainckpt.replicate.tier_uploader import TierUploader
from trainckpt.run_directory.tier_config import open_slower
from trainckpt.snapshot.verify import verify
from trainckpt.storage.local import LocalTier

preload("tests.end_to_end.lora")


def files(place):
    """What a place holds of snapshots: path -> bytes."""
    root = place / "snapshots"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_run_s_snapshots_are_in_each_tier_the_same_bytes_and_a_record_says_so(tmp_path):
    tiers = [tmp_path / "near", tmp_path / "archive"]
    attempt(tmp_path / "run", epochs=2, tiers=tiers, keep_last=1)
    for tier in tiers:
        assert files(tier).items() <= files(tmp_path / "run").items()
        assert usable(tier) == usable(tmp_path / "run")[-1:]
        assert (tier / "run.json").read_bytes() == (tmp_path / "run/run.json").read_bytes()
        assert record(tier, 1)["parent"] is None
    told = record(tmp_path / "run", 1)
    assert told["outcome"]["tiers"] == ["local", "near", "archive"]
    assert [tier["name"] for tier in told["tiers"]] == ["near", "archive"]
    assert told["durable"] == "archive"
    assert set(told["tier_commits"].values()) == {told["newest_commit"]}
    assert record(tmp_path / "archive", 1)["outcome"]["outcome"] == "finished"


def test_durable_is_the_tier_that_was_named_and_local_is_there_before(tmp_path):
    seen = []

    def save(ckpt, _):
        if ckpt.cursor.micro_batches == 2:
            seen.append(ckpt.save())
        if ckpt.cursor.micro_batches == 4:
            name = seen[0].wait("durable").snapshot
            seen.append((name, usable(tmp_path / "near"), ckpt.options.durable))

    attempt(
        tmp_path / "run",
        tiers=f"{tmp_path / 'near'}, {tmp_path / 'far'}",
        durable=str(tmp_path / "near"),
        inside=save,
        every="never",
    )
    name, there, _ = seen[1]
    assert name in there


def test_a_tier_that_refuses_holds_up_nothing_is_said_once_and_told_to_who_waits(tmp_path, caplog):
    file = tmp_path / "no directory"
    file.write_text("")
    told = []

    def save(ckpt, _):
        if ckpt.cursor.micro_batches == 2:
            told.append(ckpt.save())
        if ckpt.cursor.micro_batches == 4:
            with pytest.raises(SaveFailed, match=r"could not copy .* to far"):
                told[0].wait("durable")
            assert told[0].wait("local") is told[0]

    tiers = [file / "far", tmp_path / "good"]
    crashed(tmp_path / "run", 0)  # now it is known that no tier holds the run
    attempt(tmp_path / "run", tiers=tiers, durable="far", inside=save)
    assert caplog.text.count("copying to tier far failed") == 1
    assert usable(tmp_path / "good")[-1] == usable(tmp_path / "run")[-1]
    assert record(tmp_path / "run", 2)["outcome"]["tiers"] == ["local", "good"]
    assert record(tmp_path / "run", 2)["outcome"]["exit_code"] == 0


def test_who_waits_for_a_save_behind_a_newer_one_that_cannot_be_copied_is_told_too(
    tmp_path, monkeypatch
):
    """The newest goes first, so this one was not tried once."""
    (tmp_path / "no directory").write_text("")
    told, both_wait, look_back = [], threading.Event(), TierUploader._look_back

    def later(self):
        assert both_wait.wait(60)
        look_back(self)

    def save(ckpt, _):
        if ckpt.cursor.micro_batches == 2:
            told.append(ckpt.save())
        if ckpt.cursor.micro_batches == 5:  # one more was taken at the fourth
            ckpt._attempt.saver.wait()
            both_wait.set()
            with pytest.raises(SaveFailed, match=r"could not copy s2~2\.2 to far"):
                told[0].wait("durable")

    crashed(tmp_path / "run", 0)
    monkeypatch.setattr(TierUploader, "_look_back", later)
    far = tmp_path / "no directory" / "far"
    attempt(tmp_path / "run", tiers=[far], durable="far", inside=save)
    assert told[0].snapshot == "s1m1~2.1"


def test_what_a_killed_attempt_did_not_copy_is_copied_by_the_next_the_newest_and_tagged(tmp_path):
    def tag(ckpt, _):
        if ckpt.cursor.micro_batches == 1:
            ckpt.save(tag="best")

    crashed(tmp_path / "run", 9, inside=tag)  # without any slower tier
    before = {str(c.name): c.manifest.tags for c in catalog(tmp_path / "run") if c.usable}
    newest, best = next(iter(before)), next(n for n, tags in before.items() if "best" in tags)
    assert len(before) > 2
    crashed(
        tmp_path / "run",
        9,
        tiers=[tmp_path / "far"],
        every="never",
        inside=_wait_for(lambda: {newest, best} <= set(usable(tmp_path / "far"))),
    )
    assert set(usable(tmp_path / "far")) == {newest, best}


def _wait_for(condition):
    import time

    def inside(ckpt, _):
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    return inside


def test_older_snapshots_are_pruned_in_a_tier_by_the_same_policy(tmp_path):
    def durable(ckpt, _):
        if ckpt.cursor.micro_batches % 2 == 1:
            saves.append(ckpt.save())
        elif saves:
            saves[-1].wait("durable")

    saves = []
    attempt(tmp_path / "run", tiers=[tmp_path / "far"], keep_last=2, inside=durable, every="never")
    assert len(saves) > 3
    assert len(usable(tmp_path / "far")) == 2
    assert usable(tmp_path / "far") == usable(tmp_path / "run")[-2:]  # one more: it was being read


def test_a_flipped_bit_is_not_copied(tmp_path, caplog):
    crashed(tmp_path / "run", 9)
    newest = usable(tmp_path / "run")[-1]
    path = next((tmp_path / "run/snapshots" / newest).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "trainckpt"):
        seen = _wait_for(lambda: f"gave up copying {newest} to far: rank 0" in caplog.text)
        attempt(tmp_path / "run", tiers=[tmp_path / "far"], inside=seen)
    assert newest not in usable(tmp_path / "far")
    assert not list((tmp_path / "far/snapshots").glob(f"{newest}/*"))
    assert usable(tmp_path / "far")[-1] == usable(tmp_path / "run")[-1]


def test_a_tier_of_another_run_is_left_alone(tmp_path, caplog):
    attempt(tmp_path / "other", epochs=1)
    before = files(tmp_path / "other")
    crashed(tmp_path / "run", 0)
    attempt(tmp_path / "run", epochs=1, tiers=[tmp_path / "other"])
    assert "holds another run" in caplog.text
    assert files(tmp_path / "other") == before


def test_two_ranks_copy_each_its_own_and_what_their_files_refer_to(tmp_path):
    tiers = [str(tmp_path / "near"), str(tmp_path / "far")]
    run_ranks(lora.train_in_tiers, 2, tmp_path / "run", 2, 4, tiers)
    for tier in tiers:
        newest = next(c.manifest for c in catalog(tier) if c.usable)
        assert str(newest.name) == usable(tmp_path / "run")[-1]
        assert len(newest.reached) == 2
        assert all(copy.ok for copy in verify(LocalTier(tier), newest))
        for name, data in files(Path(tier)).items():
            assert (tmp_path / "run/snapshots" / name).read_bytes() == data
    told = record(tmp_path / "run", 1)
    assert told["outcome"]["tiers"] == ["local", "near", "far"]


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (["/mnt/archive", "/other/archive"], ["archive", "archive-2"]),
        (["file:///mnt/ckpts/{run}"], ["ckpts"]),
        (["/local", "/x y"], ["tier1", "x-y"]),
    ],
)
def test_what_tiers_are_called(tmp_path, urls, names):
    found = open_slower(urls, None, LocalTier(tmp_path / "gpt"))
    assert [tier.name for tier in found.tiers] == names
    assert found.durable == names[-1]
    assert "{run}" not in "".join(tier.url for tier in found.tiers)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tiers": ["run"]}, "is the place of the tier local"),
        ({"tiers": ["a", "b/../a"]}, "is the place of the tier a"),
        ({"tiers": ["a"], "durable": "b"}, "none of this run's tiers"),
        ({"durable": "s3"}, "none of this run's tiers"),
        ({"tiers": ["a", ""]}, "is not an option"),
    ],
)
def test_tiers_that_cannot_be_are_refused_before_anything_is_claimed(
    tmp_path, monkeypatch, options, why
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=why):
        attempt("run", **options)
    assert not (tmp_path / "run/attempts").exists()


def test_a_link_to_the_run_s_own_place_is_no_tier(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="by another name: it would hold no copy"):
        attempt(tmp_path / "run", tiers=str(tmp_path / "link"))
    assert not (tmp_path / "run/attempts").exists()


def test_a_tier_is_where_its_path_led_when_the_checkpointer_was_made_as_the_run_is(
    tmp_path, monkeypatch
):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ckpt = Checkpointer("run", tiers="far", **Parts().tracked())
    monkeypatch.chdir(tmp_path / "there")
    with ckpt:
        pass
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"run", "far"}
    assert not list((tmp_path / "there").iterdir())


def test_a_secret_in_a_tier_s_url_is_not_stored(tmp_path):
    tier = LocalTier(tmp_path)
    tier.url = "s3://key:hush@bucket/x"
    assert "hush" not in json.dumps(open_slower([], None, tier).to_facts())
    slower = open_slower([str(tmp_path / "far")], None, LocalTier(tmp_path / "run"))
    slower.tiers[0].url = tier.url
    assert "hush" not in json.dumps(slower.to_facts())
    shutil.rmtree(tmp_path / "far", ignore_errors=True)
