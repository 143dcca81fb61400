"""Whole proofs with a launcher that trains nothing: it writes the records a script would leave."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainckpt.launcher.supervise import RunResult
from trainckpt.prove.proof import ScriptFailed, prove
from trainckpt.run_directory.run_url import PROVE_VARIABLE

MICRO_BATCHES = 8
SAVED = 75


class Script:
    """In place of `supervise`: trains from where the last attempt was stopped.

    Args:
        ends: Micro-batches after which a resumed attempt ends.
        text: Of a value that it tracks, by the number of the launch.
        is_deaf: It does not hear the signals.
        writes: A path that it writes outside of the proof's folder.

    Attributes:
        seen: Working directory of each launch, and what was in it.
    """

    def __init__(self, ends=MICRO_BATCHES, text=lambda launch: "1", *, is_deaf=False, writes=""):
        self.ends, self.text, self.is_deaf, self.writes = ends, text, is_deaf, writes
        self.seen = []

    def __call__(self, command, *, environment, cwd, output, watch):
        plan = json.loads(environment[PROVE_VARIABLE])
        self.seen.append((cwd, sorted(path.name for path in Path(cwd).iterdir())))
        (Path(cwd) / "last.ckpt").touch()
        Path(plan["dir"], "written-1.jsonl").write_text(json.dumps(self.writes))
        place = Path(plan["place"])
        start = int(place.read_text()) if place.exists() else 0
        stop = None if self.is_deaf else plan.get("strike", {}).get("at")
        end = min(stop or MICRO_BATCHES, self.ends if start else MICRO_BATCHES)
        self.write_records(Path(plan["dir"]), start, end)
        place.write_text(str(end))
        record = SimpleNamespace(outcome={"outcome": "stopped"})
        return RunResult(SAVED if end == stop else 0, record)

    def write_records(self, folder, start, end):
        with (folder / "rank0.jsonl").open("w") as file:
            for at in range(start, end + 1):
                cursor = dict.fromkeys(("step", "batches", "micro_batches"), at)
                line = {
                    "at": at,
                    "in_pass": bool(at),
                    "cursor": {**cursor, "micro": 0, "evaluations": 0},
                    "parts": {"callback.seconds": self.text(len(self.seen))},
                }
                print(json.dumps(line), file=file)
                if at < end:
                    print(json.dumps({"at": at, "batch": f"batch {at}"}), file=file)


@pytest.fixture
def proven(tmp_path, monkeypatch):
    """Prove such a script, in a folder with one file; returns the proof."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(script):
        found = prove(
            ["train.py"], stops=2, nproc=None, keep=None, say=run.said.append, launch=script
        )
        assert [path.name for path in Path.cwd().iterdir()] == ["train.py"]
        return found

    run.said = []
    return run


def test_a_resumed_run_that_ends_early_has_lost_samples(proven):
    """It used to be refused as "not stopped by SIGKILL"."""
    found = proven(Script(ends=4))
    assert not found.exact
    assert (found.lost, [stop.at for stop in found.stops]) == (4, [3])
    first, second = found.verdict().splitlines()[0].split("; ")
    assert first == (
        "not exact: differs first at step 4 micro-batch 0 on rank 0: "
        "a micro-batch that no attempt trained: its samples are lost"
    )
    assert second == (
        "the resumed run ended after 4 of 8 micro-batches, so the samples of 4 are lost"
    )


def test_a_script_that_does_not_stop_is_no_proof(proven):
    with pytest.raises(ScriptFailed, match="was not stopped by SIGTERM"):
        proven(Script(is_deaf=True))


def test_a_value_that_no_two_runs_share_is_listed_and_left_out(proven):
    """Such as a time in the log of a tracked object."""
    found = proven(Script(text=str))
    assert found.exact, found.verdict()
    assert found.unrepeated == ("callback: seconds",)
    assert any("callback: seconds: two uninterrupted runs differ in it" in s for s in proven.said)
    assert found.verdict().startswith("exact: 8 micro-batches on 1 ranks")


def test_a_value_that_only_the_resume_changes_is_a_difference(proven):
    """Launches: straight, three attempts of the interrupted run, and straight again."""
    found = proven(Script(text=lambda launch: "1" if launch in (1, 5) else "2"))
    assert found.deterministic
    assert found.difference.parts == ("callback: seconds (2 instead of 1)",)


def test_each_run_has_a_working_directory_of_its_own(proven):
    """Those of the interrupted run share one, at the path of the straight run's."""
    script = Script()
    assert proven(script).exact
    first, second, third, fourth = script.seen
    assert [launch[1] for launch in script.seen] == [
        ["train.py"],
        ["train.py"],
        ["last.ckpt", "train.py"],
        ["last.ckpt", "train.py"],
    ]
    assert len({first[0], second[0], third[0], fourth[0]}) == 1


def test_what_is_written_elsewhere_is_listed(proven, tmp_path):
    (tmp_path / "elsewhere").touch()
    found = proven(Script(writes=str(tmp_path / "elsewhere")))
    assert found.outside == (str(tmp_path / "elsewhere"),)
    assert any(s.endswith(f"to the same place: {tmp_path / 'elsewhere'}") for s in proven.said)
