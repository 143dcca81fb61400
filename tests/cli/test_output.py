"""`trainckpt show`: what a snapshot holds and where it came from; `list --attempts`: who ran."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from trainckpt.attempt import heartbeat
from trainckpt.cli.main import main
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

GOLDEN = Path(__file__).parent.parent / "golden" / "v1"


def told(capsys) -> dict:
    """The one JSON document on stdout."""
    return json.loads(capsys.readouterr().out)


def golden(tmp_path, name):
    """A copy of the golden run, with an attempt's record, as a run of today has one."""
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / name, run)
    attempt_history.claim(LocalTier(run), lambda _: AttemptRecord(1, None))
    return run


def test_every_tensor_is_shown_with_type_shape_size_and_the_files_that_hold_it(tmp_path, capsys):
    run = golden(tmp_path, "two")
    assert main(["show", "--json", f"{run}@s2m1"]) == 0
    shown = told(capsys)
    manifest = json.loads((run / "snapshots/s2m1~1.1/manifest.json").read_text())
    found = {t["name"]: [t["dtype"], t["shape"], t["placement"]] for t in shown["tensors"]}
    assert found.keys() == manifest["tensors"].keys()
    plain = {n: e for n, e in manifest["tensors"].items() if e[0] != "U8"}
    assert {n: e for n, e in found.items() if n in plain} == plain
    files = [file["name"] for file in manifest["files"]]
    cut = next(t for t in shown["tensors"] if len(t["shards"]) == 2 and t["placement"] == "split")
    assert [shard["file"] for shard in cut["shards"]] == files
    assert sum(shard["shape"][0] for shard in cut["shards"]) == cut["shape"][0]
    assert cut["bytes"] == sum(shard["bytes"] for shard in cut["shards"])
    own = [t for t in shown["tensors"] if t["placement"] == "rank"]
    assert own
    assert all([s["file"] for s in t["shards"]] == files for t in own)
    assert shown["unread"] == []


def test_cursor_and_provenance_are_shown(make_run, capsys):
    run = make_run(steps=3, tag="best")
    capsys.readouterr()
    assert main(["show", "--json", str(run)]) == 0
    shown = told(capsys)
    assert (shown["run"], shown["id"], shown["attempt"]) == (str(run), "s3", 1)
    assert shown["cursor"]["step"] == 3
    assert shown["cursor"]["micro_batches"] == 3
    assert (shown["parent"], shown["world"], shown["kind"]) == (None, 1, "snapshot")
    assert shown["saved_because"] == "every 1 steps"
    assert shown["writer"].startswith("trainckpt ")
    assert shown["fingerprint"]["torch"]
    assert shown["files"][0]["bytes"] == shown["bytes"]
    assert main(["show", "--json", f"{run}@best"]) == 0
    assert told(capsys)["tags"] == ["best"]


def test_people_are_shown_the_same_as_tables(make_run, capsys):
    run = make_run(steps=2, tag="best")
    capsys.readouterr()
    assert main(["show", f"{run}@best"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "s1~1.2",
        "epoch 0 step 1 micro-batch 0",
        "begun from step 0",
        "best",
        "usable",
        "model/weight",
        "4 x 4",
        "F32",
        "64 B",
        "rank00000.safetensors",
    ):
        assert words in shown


def test_a_type_that_safetensors_lacks_is_shown_by_its_own_name(tmp_path, capsys):
    run = golden(tmp_path, "one")
    assert main(["show", "--json", str(run)]) == 0
    assert "complex128" in {t["dtype"] for t in told(capsys)["tensors"]}


def test_a_snapshot_with_a_damaged_file_is_shown_as_far_as_it_goes(make_run, capsys):
    run = make_run(steps=2)
    (folder,) = run.glob("snapshots/s2~*")
    (folder / "rank00000.safetensors").write_bytes(b"short")
    capsys.readouterr()
    assert main(["show", "--json", f"{run}@s2"]) == 0
    shown = told(capsys)
    assert shown["usable"] is False
    assert "rank00000.safetensors" in shown["unread"][0]
    weight = next(t for t in shown["tensors"] if t["name"] == "model/weight")
    assert (weight["bytes"], weight["shards"]) == (64, [])
    assert main(["show", f"{run}@s2"]) == 0
    assert "not read" in capsys.readouterr().out
    assert main(["show", "--json", str(run)]) == 0
    assert told(capsys)["id"] == "s1"


def test_a_snapshot_whose_manifest_is_gone_is_65(make_run, capsys):
    run = make_run(steps=2)
    (folder,) = run.glob("snapshots/s2~*")
    (folder / "manifest.json").unlink()
    capsys.readouterr()
    assert main(["show", "--json", f"{run}@s2"]) == 65
    assert "not committed" in told(capsys)["error"]


def test_a_run_of_which_no_snapshot_is_usable_is_65_with_the_reasons(make_run, capsys):
    run = make_run(steps=2)
    for file in run.glob("snapshots/*/*.safetensors"):
        file.unlink()
    capsys.readouterr()
    assert main(["show", "--json", str(run)]) == 65
    error = told(capsys)
    assert "s2~1.2: rank00000.safetensors is missing" in error["error"]
    assert error["hint"]


@pytest.mark.parametrize("target", ["", "@latest", "@s4"])
def test_a_run_that_committed_nothing_is_66(tmp_path, capsys, target):
    attempt_history.found_run(LocalTier(tmp_path))
    assert main(["show", "--json", f"{tmp_path}{target}"]) == 66
    assert "no snapshot was committed yet" in told(capsys)["error"]


def test_a_place_without_a_run_is_66_and_an_unknown_snapshot_65(make_run, tmp_path, capsys):
    assert main(["show", "--json", str(tmp_path / "none")]) == 66
    assert told(capsys)["code"] == 66
    run = make_run()
    for verb, *more in (("show",), ("diff", run), ("verify",)):
        capsys.readouterr()
        assert main([verb, "--json", f"{run}@s99", *map(str, more)]) == 65
        error = told(capsys)
        assert "there is no snapshot 's99'; newest: s3~1.3" in error["error"]
        assert error["hint"] == f"trainckpt list {run}"


# ---- attempts


def test_the_attempts_are_listed_with_how_each_ended_and_who_is_alive(make_run, capsys):
    run = make_run(steps=2)
    tier = LocalTier(run)
    attempt_history.claim(tier, lambda n: AttemptRecord(n, "s2~1.2", "running"))
    heartbeat.path_of(tier, 2).touch()
    attempt_history.claim(tier, lambda n: AttemptRecord(n, None, "running"))
    heartbeat.path_of(tier, 3).touch()
    os.utime(heartbeat.path_of(tier, 3), (time.time() - 60, time.time() - 60))
    attempt_history.claim(tier, AttemptRecord)
    (run / "attempts" / "5.json").write_text("{")
    capsys.readouterr()
    assert main(["list", "--json", "--attempts", str(run)]) == 0
    found = {row["attempt"]: row for row in told(capsys)["attempts"]}
    assert list(found) == [5, 4, 3, 2, 1]
    assert [found[n]["alive"] for n in found] == [False, False, False, True, False]
    assert (found[1]["outcome"], found[1]["exit_code"]) == ("finished", 0)
    assert found[2]["parent"] == "s2~1.2"
    assert main(["list", "--attempts", str(run)]) == 0
    rows = capsys.readouterr().out.split("attempt   ")[1].splitlines()
    shown = {line.split()[0]: line for line in rows if line.strip()[:1].isdigit()}
    assert "5.json is not valid JSON" in shown["5"]
    assert "dead, without a word" in shown["4"]
    assert "not chosen" in shown["4"]
    assert "dead, silent for " in shown["3"]
    assert "alive, running" in shown["2"]
    assert "finished: final" in shown["1"]


def test_without_being_asked_the_list_has_no_attempts(make_run, capsys):
    run = make_run(steps=1)
    capsys.readouterr()
    assert main(["list", "--json", str(run)]) == 0
    assert told(capsys).keys() == {"run", "candidates", "tiers"}
