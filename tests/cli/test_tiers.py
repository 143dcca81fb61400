"""The verbs over several tiers: copies are listed, checked, moved, and made good again."""

from __future__ import annotations

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from tests.cli.test_list_and_verify import flip_a_bit, snapshot, told
from tests.end_to_end.training import attempt, record, usable
from tests.s3_servers import BUCKET
from trainckpt.attempt import heartbeat
from trainckpt.cli import doctor, tier_status
from trainckpt.cli.main import main
from trainckpt.format import json_io
from trainckpt.snapshot import attempt_history
from trainckpt.storage import retry
from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import open_object_store
from trainckpt.storage.retry import Limits
from trainckpt.storage.shared_memory import SharedMemoryDir

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiered(make_run, tmp_path, monkeypatch, capsys):
    """A finished run, and a slower tier that holds its newest snapshot."""
    run, far = make_run(steps=2), tmp_path / "far"
    monkeypatch.setenv("TRAINCKPT_TIERS", str(far))
    capsys.readouterr()
    assert main(["flush", "--json", str(run)]) == 0
    document = told(capsys)
    assert [(t["tier"], t["how"]) for t in document["tiers"]] == [("far", "copied")]
    return run, far, document["snapshot"]


def test_list_tells_which_tiers_hold_each_snapshot_also_when_the_place_is_gone(tiered, capsys):
    run, _, newest = tiered
    assert main(["list", "--json", str(run)]) == 0
    first, *others = told(capsys)["candidates"]
    assert (first["name"], first["tiers"]) == (newest, ["local", "far"])
    assert all(other["tiers"] == ["local"] for other in others)
    assert main(["list", str(run)]) == 0
    assert "local far" in capsys.readouterr().out
    shutil.rmtree(run)
    assert main(["list", "--json", str(run)]) == 0
    (only,) = told(capsys)["candidates"]
    assert (only["name"], only["tiers"], only["usable"]) == (newest, ["far"], True)


def test_a_copy_of_a_dump_that_an_earlier_version_left_in_a_tier_is_not_read(tiered, capsys):
    run, far, newest = tiered
    folder = far / "dumps" / "dump~1.9"
    (folder / "images").mkdir(parents=True)
    for name in ("dump.json", "dump.mac", "images/core-1.img"):
        (folder / name).write_bytes(b"damaged")
    ended = attempt_history.read_attempts(LocalTier(run))[1]
    outcome = {**ended.outcome, "outcome": "stopped", "snapshot": "dump~1.9", "kind": "dump"}
    facts = {**ended.facts, "tiers": [{"name": "far", "url": str(far)}]}
    for place in (run, far):
        attempt_history.replace(LocalTier(place), ended.with_(outcome=outcome, facts=facts))

    for place in (run, far):
        capsys.readouterr()
        assert main(["list", "--json", str(place)]) == 0
        assert {each["kind"] for each in told(capsys)["candidates"]} == {"snapshot"}
        assert main(["verify", str(place)]) == 0
        assert main(["verify", f"{place}@dump~1.9"]) == 65
    for verb in ("flush", "fetch"):
        capsys.readouterr()
        assert main([verb, f"{run}@dump~1.9"]) == 78
        assert "dump~1.9 is a process dump, which stays in" in capsys.readouterr().err
        assert main([verb, "--json", str(run)]) == 0
        assert told(capsys)["snapshot"] == newest


def test_verify_reads_every_copy_and_names_the_bad_one_and_flush_and_fetch_repair_it(
    tiered, capsys
):
    run, far, newest = tiered
    assert main(["verify", "--json", str(run)]) == 0
    copies = told(capsys)["copies"]
    assert {c["tier"] for c in copies if c["snapshot"] == newest} == {"local", "far"}
    for place, tier, verb in ((far, "far", "flush"), (run, "local", "fetch")):
        flip_a_bit(next(snapshot(place, newest.partition("~")[0]).glob("*.safetensors")))
        assert main(["verify", "--json", str(run)]) == 65
        bad = [(c["snapshot"], c["tier"]) for c in told(capsys)["copies"] if not c["ok"]]
        assert bad == [(newest, tier)]
        assert main([verb, "--json", str(run)]) == 0
        assert [t["how"] for t in told(capsys)["tiers"]] == ["repaired"]
        assert main(["verify", str(run)]) == 0
        capsys.readouterr()
    assert main(["flush", "--json", f"{run}@{newest}", "--to", "far"]) == 0
    assert [t["how"] for t in told(capsys)["tiers"]] == ["was there"]


def test_a_snapshot_that_is_bad_in_every_copy_is_65_and_nothing_is_left_of_a_try(tiered, capsys):
    run, far, newest = tiered
    for place in (run, far):
        flip_a_bit(next(snapshot(place, newest.partition("~")[0]).glob("*.safetensors")))
    assert main(["verify", "--json", str(run)]) == 65
    assert len([c for c in told(capsys)["copies"] if not c["ok"]]) == 2
    assert main(["flush", str(run), "--to", str(far.parent / "third")]) == 65
    assert "does not match its digest" in capsys.readouterr().err
    assert not list((far.parent / "third").rglob("*.safetensors"))


def test_fetch_makes_a_lost_place_whole_again(tiered, capsys, monkeypatch):
    run, far, newest = tiered
    shutil.rmtree(run)
    monkeypatch.delenv("TRAINCKPT_TIERS")
    assert main(["fetch", "--json", str(run), "--from", str(far)]) == 0
    assert told(capsys)["snapshot"] == newest
    assert main(["list", "--json", str(run)]) == 0
    (only,) = told(capsys)["candidates"]
    assert (only["name"], only["usable"]) == (newest, True)
    assert json.loads((run / "attempts/1.json").read_text())["attempt"] == 1


def test_a_tier_that_does_not_answer_is_69_and_named(tiered, capsys):
    run, far, _ = tiered
    shutil.rmtree(far)
    far.write_text("")
    assert main(["verify", "--json", str(run)]) == 69
    (silent,) = [c for c in told(capsys)["copies"] if not c["ok"]]
    assert (silent["tier"], silent["file"]) == ("far", "")
    assert main(["flush", str(run)]) == 69
    assert main(["flush", str(run), "--to", "far"]) == 69
    assert main(["list", str(run)]) == 0
    assert "the tier far does not answer" in capsys.readouterr().err


def test_fetch_brings_the_attempts_that_the_place_lacks_and_changes_none_that_it_has(
    tiered, capsys
):
    """The tier was away while the place went on, and holds what was known before."""
    run, far, newest = tiered
    ours = LocalTier(run)
    stale = attempt_history.read_attempts(ours)[1].with_(outcome=None, newest_commit=None)
    (far / "attempts/1.json").write_bytes(stale.dump())
    attempt_history.replace(LocalTier(far), stale.with_(attempt=2, parent=newest))
    before = (run / "attempts/1.json").read_bytes()
    flip_a_bit(snapshot(run, newest.partition("~")[0]) / "rank00000.safetensors")
    assert main(["fetch", str(run), "--from", str(far)]) == 0
    assert (run / "attempts/1.json").read_bytes() == before
    assert (run / "attempts/2.json").read_bytes() == (far / "attempts/2.json").read_bytes()
    assert main(["flush", str(run)]) == 0
    assert (far / "attempts/1.json").read_bytes() == before


def test_flush_and_fetch_leave_another_snapshot_of_the_same_name_as_it_is(tiered, capsys):
    """As after two starts on hosts with a disk of their own, which both go on to one tier."""
    run, far, newest = tiered
    manifest = json.loads((far / "snapshots" / newest / "manifest.json").read_text())
    del manifest["digest"]
    other = json_io.with_digest({**manifest, "created": manifest["created"] + 1})
    (far / "snapshots" / newest / "manifest.json").write_bytes(other)
    flip_a_bit(snapshot(far, newest.partition("~")[0]) / "rank00000.safetensors")
    for verb, target, which in (("flush", far, "--to"), ("fetch", run, "--from")):
        before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
        assert main([verb, f"{run}@{newest}", which, "far"]) == 74
        assert f"cannot copy {newest}: " in capsys.readouterr().err
        assert before == {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}


def test_what_stands_in_memory_is_a_copy_too(make_run, capsys):
    run = make_run(steps=2)
    memory = SharedMemoryDir.of(str(run))
    newest = max((run / "snapshots").iterdir())
    folder = memory.root / "snapshots" / newest.name
    folder.mkdir(parents=True, mode=0o700)
    for path in newest.glob("*.safetensors"):
        shutil.copy(path, folder / path.name)
    flip_a_bit(folder / "rank00000.safetensors")
    capsys.readouterr()
    assert main(["verify", "--json", str(run)]) == 65
    (bad,) = [c for c in told(capsys)["copies"] if not c["ok"]]
    assert (bad["tier"], bad["snapshot"]) == ("memory", newest.name)
    memory.remove()


def test_list_says_of_each_tier_where_it_is_and_what_the_run_has_met_there(tiered, capsys):
    run, far, newest = tiered
    assert main(["list", "--json", str(run)]) == 0
    local, slower = told(capsys)["tiers"]
    assert (local["name"], local["url"], local["newest"]) == ("local", str(run), newest)
    assert (slower["name"], slower["url"], slower["newest"]) == ("far", str(far), newest)
    assert (slower["answers"], slower["breaker"], slower["trouble"]) == (True, None, None)

    tier = LocalTier(run)
    met = {"far": {"breaker": "open", "lags": "s2~1.2: 503", "since": 0.0}}
    facts = {"tiers": [{"name": "far", "url": str(far)}], "tier_trouble": met}
    found = attempt_history.read_attempts(tier)[1]
    attempt_history.replace(tier, found.with_(facts={**found.facts, **facts}))
    assert main(["list", "--json", str(run)]) == 0
    assert told(capsys)["tiers"][1]["trouble"] == {"attempt": 1, **met["far"]}
    words = tier_status.in_words({"attempt": 1, **met["far"]})
    assert words.endswith(", left alone (open), lags behind: s2~1.2: 503")
    shutil.rmtree(far)
    far.write_text("")
    assert main(["list", "--json", str(run)]) == 0
    assert [(t["name"], t["answers"]) for t in told(capsys)["tiers"]] == [
        ("local", True),
        ("far", False),
    ]
    assert main(["list", str(run)]) == 0
    assert "newest there" in capsys.readouterr().out


def test_doctor_measures_every_tier_and_says_how_calls_to_a_store_went(
    tiered, capsys, monkeypatch, rclone_server, at
):
    run, far, _ = tiered
    at(rclone_server)
    monkeypatch.setattr(doctor, "check_host", list)
    monkeypatch.setattr(doctor, "PROBE_BYTES", 4 << 20)
    monkeypatch.setattr(doctor, "STORE_PROBE_BYTES", 1 << 20)
    store = f"s3://{BUCKET}/doctor"
    monkeypatch.setenv("TRAINCKPT_TIERS", f"{far},{store}?token=hush")
    before = sorted(far.rglob("*"))

    def items():
        assert main(["doctor", "--json", str(run)]) == 0
        return {item["name"]: item for item in told(capsys)["items"]}

    found = items()
    assert found["tier far"]["value"].startswith(f"{far}: writes ")
    assert found["tier s3"]["value"].startswith(f"{store}: writes ")
    assert "/s and reads " in found["tier s3"]["value"]
    assert found["calls to s3"]["value"].startswith("closed")
    assert sorted(far.rglob("*")) == before
    assert open_object_store(f"{store}?token=hush").list("") == []

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(retry, "Limits", partial(Limits, give_up_first_s=0.0))
    found = items()
    assert not found["tier s3"]["ok"]
    assert not found["tier s3"]["needed"]
    assert "hush" not in json.dumps(found)
    assert found["calls to s3"]["value"].startswith("open; met ")


def test_prune_goes_over_every_tier_or_the_one_that_is_named(
    make_run, tmp_path, capsys, monkeypatch
):
    run, far = make_run(steps=3), tmp_path / "far"
    monkeypatch.setenv("TRAINCKPT_TIERS", str(far))
    names = usable(run)
    for name in names:
        assert main(["flush", f"{run}@{name}"]) == 0
    (far / "snapshots/s9~1.9").mkdir()  # garbage, or what a live attempt copies just now
    capsys.readouterr()

    def pruned(*options, code=0):
        assert main(["prune", "--json", str(run), *options]) == code
        document = told(capsys)
        return [(row["tier"], row["name"]) for row in document["pruned"]], document

    beat = heartbeat.path_of(LocalTier(run), 1)
    beat.touch()
    os.utime(beat, (time.time() + 3600, time.time() + 3600))  # alive, however slow this machine is
    assert pruned("--keep-last", "2", "--tier", "far")[0] == [("far", names[0])]
    beat.unlink()
    assert usable(run) == names
    rows, document = pruned("--keep-last", "1")
    assert rows == [("local", names[1]), ("local", names[0]), ("far", "s9~1.9"), ("far", names[1])]
    assert usable(run) == usable(far) == document["kept"] == names[-1:]
    shutil.rmtree(far)
    far.write_text("")
    rows, document = pruned(code=69)
    assert rows == []
    assert document["notes"][-1].startswith("tier far was not pruned: ")


@pytest.mark.parametrize("verb", [["prune", "--tier"], ["fetch", "--from"]])
def test_a_tier_that_does_not_hold_the_run_is_78_with_those_that_do(tiered, capsys, verb):
    run, *_ = tiered
    assert main([verb[0], str(run), verb[1], "fra"]) == 78
    said = capsys.readouterr().err
    assert f"no tier 'fra' holds the run of {run}\n" in said
    assert "next: one of local, far\n" in said


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.end_to_end.training import attempt

attempt("runs/elsewhere", epochs=2)
"""


def test_a_run_that_is_in_a_store_alone_goes_on_on_another_machine_by_its_url(
    tmp_path, capfd, monkeypatch, rclone_server, at
):
    at(rclone_server)
    url, here = f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "here"
    attempt(tmp_path / "there/run", epochs=1, tiers=[url])
    begun_from = usable(tmp_path / "there/run")[-1]
    shutil.rmtree(tmp_path / "there")
    store = open_object_store(url)
    told_then = attempt_history.read_attempts(store)[1]
    launched = {
        "argv": ["/no/such/bin/python", "train.py"],
        "cwd": "/no/such/folder",
        "launch": {"kind": "python", "nproc": 1},
    }
    attempt_history.replace(store, told_then.with_(facts={**told_then.facts, **launched}))

    here.mkdir()
    (here / "train.py").write_text(SCRIPT.format(root=str(ROOT)))
    monkeypatch.chdir(here)
    assert main(["resume", "--json", url]) == 0, capfd.readouterr().err
    ended = told(capfd)
    assert ended["outcome"] == "finished"
    assert ended["tiers"] == ["local", "s3"]
    assert record(here / "runs/elsewhere", 2)["parent"] == begun_from
    newest = record(here / "runs/elsewhere", 2)["newest_commit"]
    assert store.size(f"snapshots/{newest}/manifest.json")
    assert os.environ.get("TRAINCKPT_RESUME") is None

    assert main(["resume", "--json", str(here / "nothing")]) == 66
