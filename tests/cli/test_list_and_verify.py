"""What a run has, and whether its bytes are good: as tables, as JSON, and as exit codes."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from trainckpt.cli.main import main
from trainckpt.snapshot.catalog import ABANDONED, NOT_COMMITTED

LISTED = {
    "id",
    "kind",
    "attempt",
    "epoch",
    "step",
    "micro",
    "world",
    "bytes",
    "created",
    "tiers",
    "usable",
    "reason",
}


def told(capsys) -> dict:
    """The one JSON document on stdout."""
    return json.loads(capsys.readouterr().out)


def flip_a_bit(path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def snapshot(run, name: str):
    """The folder of the snapshot with this id."""
    (folder,) = run.glob(f"snapshots/{name}~*")
    return folder


def test_list_tells_each_candidate_newest_first(make_run, capsys):
    """All that a program needs to choose one."""
    run = make_run(steps=3)
    capsys.readouterr()
    assert main(["list", "--json", str(run)]) == 0
    listed = told(capsys)
    assert listed["run"] == str(run)
    assert [c["id"] for c in listed["candidates"]] == ["s3", "s2", "s1"]
    for candidate in listed["candidates"]:
        assert candidate.keys() >= LISTED
        assert candidate["usable"] is True
        assert candidate["reason"] == ""
        assert candidate["kind"] == "snapshot"
        assert candidate["tiers"] == ["local"]
        assert candidate["bytes"] > 0
    assert listed["candidates"][0]["saved_because"] == "every 1 steps"


def test_list_shows_people_a_table(make_run, capsys):
    """Ids, sizes, tags, and whether each can be used."""
    run = make_run(steps=2, tag="best")
    assert main(["list", str(run)]) == 0
    shown = capsys.readouterr().out
    assert str(run) in shown.replace("\n", "")
    for word in ("s2", "best", "KB", "yes"):
        assert word in shown


def test_list_says_why_a_candidate_is_refused(make_run, capsys):
    """Cut short, damaged, never committed, on a branch that was left."""
    run = make_run(steps=2, tag="best")  # s1 twice: unasked, then with the tag
    make_run(steps=4, at="s1~1.1")
    (snapshot(run, "s4") / "manifest.json").unlink()
    flip_a_bit(snapshot(run, "s3") / "manifest.json", 30)
    file = run / "snapshots" / "s2~2.1" / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    capsys.readouterr()
    assert main(["list", "--json", str(run)]) == 0
    found = {c["name"]: c for c in told(capsys)["candidates"]}
    assert [name for name in found if found[name]["usable"]] == ["s1~1.1"]
    assert found["s4~2.3"]["reason"] == NOT_COMMITTED
    assert "digest" in found["s3~2.2"]["reason"]
    assert found["s2~2.1"]["reason"].startswith("rank00000.safetensors has ")
    assert found["s1~1.2"]["reason"] == ABANDONED
    assert found["s1~1.2"]["tags"] == ["best"]
    assert main(["list", str(run)]) == 0
    assert NOT_COMMITTED in capsys.readouterr().out


def test_a_run_without_snapshots_is_listed_as_that(make_run, capsys):
    """It exists, so it is no error."""
    run = make_run(steps=1)
    for folder in run.glob("snapshots/*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    capsys.readouterr()
    assert main(["list", str(run)]) == 0
    assert "no snapshot was committed yet" in capsys.readouterr().out


def test_verify_misses_the_newest_commit_that_was_recorded(make_run, capsys):
    run = make_run(steps=3)
    shutil.rmtree(snapshot(run, "s2"))
    capsys.readouterr()
    assert main(["verify", "--json", str(run)]) == 0  # an older one may have been pruned
    capsys.readouterr()
    shutil.rmtree(snapshot(run, "s3"))
    assert main(["verify", "--json", str(run)]) == 65
    (bad,) = [copy for copy in told(capsys)["copies"] if not copy["ok"]]
    assert (bad["snapshot"], bad["reason"]) == (
        "s3~1.3",
        "attempt 1 committed it, but it is missing",
    )


def test_verify_reads_every_file_of_every_snapshot(make_run, capsys):
    """All good: 0, and each file is listed."""
    run = make_run(steps=3)
    capsys.readouterr()
    assert main(["verify", "--json", str(run)]) == 0
    found = told(capsys)
    assert found["ok"] is True
    assert [copy["file"] for copy in found["copies"]] == ["rank00000.safetensors"] * 3
    for copy in found["copies"]:
        assert {"snapshot", "tier", "file", "ok", "reason"} <= copy.keys()


@pytest.mark.parametrize("at", [9, 4200, -1])
def test_verify_names_the_file_with_a_flipped_bit(make_run, capsys, at):
    """In the header, in the data, in the last byte: 65."""
    run = make_run(steps=2)
    flip_a_bit(snapshot(run, "s1") / "rank00000.safetensors", at)
    capsys.readouterr()
    assert main(["verify", "--json", str(run)]) == 65
    found = told(capsys)
    bad = [copy for copy in found["copies"] if not copy["ok"]]
    assert found["ok"] is False
    assert [(c["snapshot"], c["file"]) for c in bad] == [("s1~1.1", "rank00000.safetensors")]
    assert bad[0]["reason"] == "does not match its digest"
    assert main(["verify", str(run)]) == 65
    assert "does not match its digest" in capsys.readouterr().out


def test_verify_of_one_snapshot_leaves_the_others_alone(make_run, capsys):
    """By id, by full name, by tag, or the latest."""
    run = make_run(steps=3, tag="best")
    flip_a_bit(snapshot(run, "s3") / "rank00000.safetensors")
    for good in ("s1", "best", "s2"):
        assert main(["verify", f"{run}@{good}"]) == 0
    for bad in ("s3", "latest"):
        assert main(["verify", f"{run}@{bad}"]) == 65
    capsys.readouterr()
    assert main(["verify", "--json", f"{run}@s9"]) == 65
    assert "there is no snapshot 's9'" in told(capsys)["error"]


def test_verify_names_a_damaged_manifest(make_run, capsys):
    """Without it nothing else of the snapshot can be checked."""
    run = make_run(steps=2)
    flip_a_bit(snapshot(run, "s1") / "manifest.json", 30)
    capsys.readouterr()
    assert main(["verify", "--json", str(run)]) == 65
    (bad,) = [copy for copy in told(capsys)["copies"] if not copy["ok"]]
    assert (bad["snapshot"], bad["file"]) == ("s1~1.1", "manifest.json")


@pytest.mark.parametrize("verb", ["list", "verify", "resume"])
def test_an_unknown_run_is_66_and_is_not_made_by_looking(verb, tmp_path, capsys):
    """An error as JSON says what, which code, and what to do."""
    assert main([verb, "--json", str(tmp_path / "none")]) == 66
    error = told(capsys)
    assert error["code"] == 66
    assert "there is no run at" in error["error"]
    assert error["hint"]
    assert not (tmp_path / "none").exists()
    assert main([verb, str(tmp_path / "none")]) == 66
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: there is no run at")


@pytest.mark.parametrize("verb", ["list", "verify", "show", "prune", "pause", "diff", "export"])
def test_a_folder_of_runs_or_within_one_is_66_with_the_run_that_may_be_meant(
    make_run, tmp_path, capsys, verb
):
    run = make_run(steps=1)
    more = {"diff": [str(run)], "export": [str(tmp_path / "exported")]}.get(verb, [])
    capsys.readouterr()
    assert main([verb, str(tmp_path), *more]) == 66
    said = capsys.readouterr().err
    assert f"there is no run at {tmp_path}: it is a folder that holds runs: {run.name}\n" in said
    assert f"next: name one: {run}\n" in said
    assert main([verb, str(run / "snapshots"), *more]) == 66
    said = capsys.readouterr().err
    assert f"there is no run at {run}/snapshots: it is in the run {run}\n" in said
    assert f"next: name that: {run}\n" in said


@pytest.mark.parametrize("content", ['{"name": "theirs"}', '{"id": "theirs"}', "[]", "not JSON"])
def test_a_file_of_that_name_that_is_no_record_makes_no_run(tmp_path, capsys, content):
    for folder in (tmp_path, tmp_path / "mine" / "child"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(content)
    assert main(["list", str(tmp_path / "mine")]) == 66
    captured = capsys.readouterr().err
    assert f"there is no run at {tmp_path}/mine\nnext: check the path" in captured


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="gives root away, so needs it")
@pytest.mark.parametrize("verb", ["list", "verify", "resume"])
def test_a_place_that_denies_a_look_is_69_and_never_empty(verb, make_run):
    """Permission denied is not "no checkpoints"."""
    run = make_run(steps=1)
    run.chmod(0o700)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            code = main([verb, "--json", str(run)])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 69


def test_a_place_that_is_not_a_directory_is_refused(tmp_path, capsys):
    """Another kind of address: 78, with what is possible."""
    assert main(["list", "--json", "nothing://bucket/run"]) == 78
    assert "nothing://bucket/run" in told(capsys)["error"]
