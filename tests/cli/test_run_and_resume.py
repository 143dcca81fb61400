"""`trainckpt run` and `trainckpt resume` with the real torchrun and the example, on two ranks.

One run goes through all of it, since each start of torchrun takes seconds: its ranks are killed,
the supervisor gets SIGTERM, `one_rank`: one rank alone gets it, too, and at last the run finishes;
its trace is that of the uninterrupted run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.campaign import launch
from tests.campaign.cases import Settings
from tests.limits import HANG_S
from trainckpt.cli.main import main
from trainckpt.encryption import keys
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history
from trainckpt.storage import replica_slots
from trainckpt.storage.shared_memory import SharedMemoryDir

ROOT = launch.ROOT
MAIN = str(ROOT / "src" / "trainckpt" / "cli" / "main.py")
SETTINGS = Settings("char_gpt", "ddp", 2, 3, 2, 0.1, 2, 4)
STEPS = 30


def argv(folder: Path) -> list[str]:
    flags = SETTINGS.argv(str(folder / "run"), str(folder / "trace"))
    flags[flags.index("--steps") + 1] = str(STEPS)
    return flags


def lines(folder: Path, rank: int = 0) -> list[str]:
    file = folder / "trace" / f"rank{rank}.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def merged(folder: Path, rank: int) -> list[str]:
    """The trace with repeated places merged; the same place twice with other bytes is an error."""
    found: dict[tuple, str] = {}
    for line in lines(folder, rank):
        entry = json.loads(line)
        assert found.setdefault((entry["step"], entry["micro"]), line) == line
    return [found[place] for place in sorted(found)]


def outcome(folder: Path, attempt: int) -> dict:
    return attempt_history.read_attempts(open_directory(str(folder / "run")))[attempt].outcome


def wait_for(condition, process=None) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Trainckpt:
    """The command, forked from the warm server; torchrun and its ranks are started afresh."""

    def __init__(self, server, log: Path, *arguments: str, **variables: str) -> None:
        self.server, self.log = server, log
        answer = server.ask(script=MAIN, argv=list(arguments), log=str(log), ranks=[variables])
        (self.pid,) = answer["pids"]

    def wait(self) -> int:
        wait_for(lambda: self.server.ask(poll=[self.pid])["codes"] != [None])
        return self.server.ask(poll=[self.pid])["codes"][0]

    def after(self, folder: Path, more: int, act) -> int:
        """Call `act` once the ranks have trained so many more micro-batches; the exit code."""
        wanted = len(lines(folder, 1)) + more

        def trained() -> bool:
            assert self.server.ask(poll=[self.pid])["codes"] == [None], self.shown()
            return len(lines(folder, 1)) >= wanted

        wait_for(trained)
        act()
        return self.wait()

    def shown(self) -> str:
        return Path(f"{self.log}.rank0").read_text()


def newest_pids(folder: Path) -> list[int]:
    records = attempt_history.read_attempts(open_directory(str(folder / "run")))
    return records[max(records)].facts["pids"]


def send_all(pids: list[int], number: int) -> None:
    """One rank alone would do, but the other gives it some time before it gives up."""
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.parametrize("one_rank", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_is_killed_stopped_resumed_and_exact(server, tmp_path, one_rank):
    """SIGKILL of the ranks, SIGTERM to the supervisor, SIGTERM to one rank: not a bit is lost.

    The attempts after the first encrypt, the last is told how to read that.
    """
    reference, folder = tmp_path / "reference", tmp_path / "interrupted"
    reference.mkdir()
    folder.mkdir()
    straight = launch.Forked(server, SETTINGS, argv(reference), tmp_path / "reference.log")
    wait_for(lambda: None not in straight.codes())
    assert straight.codes() == [0, 0], straight.logs()
    run = str(folder / "run")

    first = Trainckpt(
        server,
        folder / "first",
        "run",
        "--nproc",
        "2",
        "--",
        f"{ROOT}/examples/char_gpt.py",
        *argv(folder),
    )
    code = first.after(folder, 12, lambda: send_all(newest_pids(folder), signal.SIGKILL))
    assert code not in (0, 75), first.shown()
    killed = outcome(folder, 1)
    assert killed["outcome"] == "killed"
    assert killed["exit_code"] == code
    assert not any(map(launch.alive, newest_pids(folder)))

    keys.write_identity(folder / "identity", identity := keys.generate())
    to = {"TRAINCKPT_ENCRYPT_TO": identity.recipient}
    second = Trainckpt(server, folder / "second", "resume", run, **to)
    code = second.after(folder, 8, lambda: os.kill(second.pid, signal.SIGTERM))
    assert code == 75, second.shown()
    stopped = outcome(folder, 2)
    assert (stopped["outcome"], stopped["exit_code"]) == ("stopped", 75)
    assert stopped["snapshot"].split("~")[1].startswith("2.")
    assert stopped["lost_micro_batches"] == 0
    assert stopped["exactness"] == "bitwise"
    assert stopped["tiers"] == ["local"]

    read = ("--identity", str(folder / "identity"))
    if one_rank:
        third = Trainckpt(server, folder / "third", "resume", *read, run, **to)
        code = third.after(folder, 8, lambda: os.kill(newest_pids(folder)[1], signal.SIGTERM))
        assert code == 75, third.shown()
        assert outcome(folder, 3)["outcome"] == "stopped"

    last = Trainckpt(server, folder / "last", "resume", "--json", *read, run)
    assert last.wait() == 0, last.shown()
    number = 3 + one_rank
    assert outcome(folder, number)["outcome"] == "finished"
    newest = next((folder / "run/snapshots").glob(f"*~{number}.*/manifest.json"))
    manifest = json.loads(newest.read_bytes())
    assert manifest["encryption"]["keys"].keys() == {
        f"{manifest['id']}~{number}.{manifest['sequence']}"
    }
    for rank in range(2):
        assert merged(folder, rank) == lines(reference, rank)
        final = f"trace/final{rank}.json"
        assert (folder / final).read_bytes() == (reference / final).read_bytes()


def test_a_script_that_fails_by_itself_passes_its_code_through(tmp_path):
    """Under torchrun, which would say 1; torchrun's own options; stdout is one document."""
    script = ROOT / "tests" / "sensitivity" / "script.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trainckpt.cli.main", "run", "--json"),
            *("--max-restarts=0", "--nproc-per-node=2", "--", str(script)),
            *("--run", str(tmp_path / "run"), "--fail-at", "2,1"),
        ],
        env=launch.environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 3, done.stderr
    told = json.loads(done.stdout)
    assert told["outcome"] == "failed"
    assert told["exit_code"] == 3
    assert {"snapshot", "kind", "exactness", "lost_micro_batches", "tiers", "seconds"} <= set(told)
    record = attempt_history.read_attempts(open_directory(str(tmp_path / "run")))[1]
    assert record.outcome["outcome"] == "failed"
    assert record.facts["world"] == 2


# ---- resume, of records made by hand: the command is a small Python program without torch

TELL = """
import json, os, sys
names = ("TRAINCKPT_ACCEPT_OLDER", "TRAINCKPT_RESUME_AT", "TRAINCKPT_RESTART", "ACCELERATE_X",
         "TRAINCKPT_TIERS", "SLURM_JOB_ID")
with open(sys.argv[1], "a") as file:
    print(json.dumps([os.environ.get(name) for name in names]), file=file)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def recorded(tmp_path):
    """A run whose newest attempt was launched like this; returns where its command will tell."""
    file = tmp_path / "told"

    def make(kind: str, code: int = 0, **more: object) -> Path:
        tier = open_directory(str(tmp_path / "run"))
        attempt_history.found_run(tier)
        facts = {
            "argv": [sys.executable, "-c", TELL, str(file), str(code)],
            "cwd": str(tmp_path),
            "launch": {"kind": kind, "nproc": 1},
            **more,
        }
        attempt_history.claim(tier, lambda number: AttemptRecord(number, facts=facts))
        return file

    return make


def told(file: Path) -> list:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_resume_is_asked_for_reaches_the_ranks(make_run, recorded, tmp_path, capfd):
    """As variables, which every launcher hands on."""
    make_run(steps=3)
    file = recorded("python")
    run = str(tmp_path / "run")
    assert main(["resume", run]) == 0
    assert main(["resume", run, "--accept-older", "--at", "s3"]) == 0
    far = str(tmp_path / "far")
    assert main(["resume", run, "--tiers", far]) == 0
    assert told(file) == [[None] * 6, ["1", "s3", *[None] * 4], [*[None] * 4, far, None]]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [("s99", "there is no snapshot 's99'; newest: s3~1.3"), ("s2", "s2~1.2: not committed")],
)
def test_a_snapshot_that_is_not_there_is_65_before_anything_is_launched(
    make_run, recorded, tmp_path, capfd, wanted, why
):
    run = make_run(steps=3)
    file = recorded("python")
    next(run.glob("snapshots/s2~*/manifest.json")).unlink()
    capfd.readouterr()
    assert main(["resume", str(run), "--at", wanted]) == 65
    shown = capfd.readouterr().err
    assert f"error: {why}" in shown
    assert f"next: trainckpt list {run}" in shown
    assert not file.exists()
    assert len(list((run / "attempts").iterdir())) == 2


def test_a_folder_of_runs_is_66_with_the_runs_that_it_holds(make_run, tmp_path, capfd):
    make_run("x 1", steps=1)
    (tmp_path / "no-run").mkdir()
    capfd.readouterr()
    assert main(["resume", f"{tmp_path}/"]) == 66
    shown = capfd.readouterr().err
    assert f"there is no run at {tmp_path}: it is a folder that holds runs: x 1\n" in shown
    assert f"next: name one: '{tmp_path}/x 1'\n" in shown
    for number in range(11):
        shutil.copytree(tmp_path / "x 1", tmp_path / f"y{number:02}")
    assert main(["resume", str(tmp_path)]) == 66
    shown = capfd.readouterr().err
    assert "holds runs: x 1, y00, y01, y02, y03, y04, y05, y06, y07, y08 and 2 more\n" in shown
    assert f"next: name one: {tmp_path}/<name>\n" in shown
    assert main(["resume", str(tmp_path / "no-run")]) == 66
    assert "next: check the path" in capfd.readouterr().err


@pytest.mark.parametrize(("after", "option"), [("s1", " --at s1"), ("", "")])
def test_a_snapshot_behind_the_run_is_66_with_the_option_that_names_it(
    make_run, capfd, after, option
):
    run = make_run(steps=1)
    capfd.readouterr()
    assert main(["resume", f"{run}@{after}"]) == 66
    shown = capfd.readouterr().err
    assert f"there is no run at {run}@{after}; there is one at {run}\n" in shown
    assert f"next: trainckpt resume {run}{option}\n" in shown
    assert main(["resume", f"{run}-mistyped@s1"]) == 66
    assert "next: check the path" in capfd.readouterr().err


def test_a_snapshot_that_may_be_in_memory_or_in_a_silent_tier_is_left_to_the_launch(
    make_run, recorded, tmp_path, capfd
):
    """As the ranks do, which look there too."""
    run = make_run(steps=3)
    file = recorded("python")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "run.json").write_text("{")
    assert main(["resume", str(run), "--at", "s9", "--tiers", str(tmp_path / "far")]) == 0
    memory = SharedMemoryDir.of(str(run))
    manifest = next(run.glob("snapshots/s3~*/manifest.json"))
    replica_slots.write_manifest(memory, f"snapshots/{manifest.parent.name}", manifest.read_bytes())
    shutil.rmtree(manifest.parent)
    assert main(["resume", str(run), "--at", "s3"]) == 0
    assert len(told(file)) == 2
    memory.remove()


def test_a_script_whose_place_its_launcher_named_finds_it_again(recorded, tmp_path, capfd):
    """As `trainckpt run --run` named it; of a copy, the place that the record names."""
    tell = "import os, sys; print(os.environ.get('TRAINCKPT_RUN'), file=open(sys.argv[1], 'a'))"
    argv, run = [sys.executable, "-c", tell, str(tmp_path / "told")], str(tmp_path / "run")
    file = recorded("python", argv=argv)
    assert main(["resume", run]) == 0
    there = str(tmp_path / "there")
    tiers = [{"name": "far", "url": run}]
    recorded("python", argv=argv, where=there, tiers=tiers)
    assert main(["resume", run]) == 0
    recorded("python", argv=argv, where="s3://<redacted>@b", tiers=tiers)
    assert main(["resume", run]) == 0
    assert file.read_text().split() == [run, there, "None"]


@pytest.mark.parametrize("word", ["{}", "--run={}", "--run=~/before", "{}/../by-link/before"])
def test_a_run_that_was_moved_is_not_begun_anew_where_its_command_says(
    recorded, tmp_path, capfd, monkeypatch, word
):
    """Once a link stands in the former place, the command means the run again."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "by-link").symlink_to(tmp_path)
    before = tmp_path / "before"
    argv = [sys.executable, "-c", TELL, str(tmp_path / "told"), "0", word.format(before)]
    file = recorded("python", argv=argv, where=str(before))
    assert main(["resume", str(tmp_path / "run")]) == 78
    assert f"names {before}, where the run was" in capfd.readouterr().err
    assert not file.exists()
    before.symlink_to(tmp_path / "run")
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert file.exists()


def test_resume_starts_again_what_fails(recorded, tmp_path, capfd):
    """As often as it is told to; the command's own code passes through."""
    file = recorded("python", 4)
    assert main(["resume", str(tmp_path / "run"), "--max-restarts", "1"]) == 4
    assert told(file) == [[None] * 6] * 2
    shown = capfd.readouterr().err
    assert "the script ended with 4; restart 1 of 1" in shown
    assert main(["resume", str(tmp_path / "run"), "--max-restarts", "many"]) == 78


def test_a_run_of_accelerate_gets_its_variables_back(recorded, tmp_path, monkeypatch, capfd):
    """Under torchrun, which is what accelerate launches with; a secret is not made up."""
    monkeypatch.delenv("ACCELERATE_X", raising=False)
    env = {"ACCELERATE_X": "bf16", "ACCELERATE_TOKEN": "<redacted>"}
    file = recorded("accelerate", env=env)
    assert main(["resume", "--json", str(tmp_path / "run")]) == 0
    assert told(file) == [[None, None, None, "bf16", None, None]]
    assert json.loads(capfd.readouterr().out)["exit_code"] == 0


def test_a_run_that_is_resumed_is_no_part_of_the_slurm_job_in_which_it_began(
    recorded, tmp_path, monkeypatch, capfd
):
    """Else it would stop when that job ends, and queue that job again."""
    file = recorded("python", env={"SLURM_JOB_ID": "7"})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["resume", str(tmp_path / "run")]) == 0
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert [line[-1] for line in told(file)] == [None, "8"]


def test_a_command_without_a_checkpointer_keeps_its_options_when_it_is_launched_again(
    recorded, tmp_path, capfd
):
    """The supervisor needs them too: to whom its dumps are encrypted."""
    env = {"TRAINCKPT_ENCRYPT_TO": keys.generate().recipient}
    recorded("python", launch={"kind": "python", "nproc": 1, "by": "supervisor"}, env=env)
    assert main(["resume", str(tmp_path / "run")]) == 0
    facts = attempt_history.read_attempts(open_directory(str(tmp_path / "run")))[2].facts
    assert {name: facts["env"].get(name) for name in env} == env


def test_a_run_of_srun_says_what_to_type(recorded, tmp_path, capfd):
    """Only Slurm can start its tasks again."""
    file = recorded("srun")
    assert main(["resume", str(tmp_path / "run")]) == 78
    assert "run the srun line again" in capfd.readouterr().err
    assert not file.exists()
