"""Ray Train kills, drains and restarts workers, and the run is the uninterrupted one.

Each job is a driver of its own (`ray_job.py`), with a cluster of its own on this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import trainckpt
from tests.integrations.ray_job import EPOCHS, ITEMS
from tests.s3_servers import BUCKET
from trainckpt.integrations.ray_report import ReportedSnapshots, pointer_to, read_pointer

Checkpoint = pytest.importorskip("ray.train").Checkpoint
fs = pytest.importorskip("pyarrow.fs")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
AT = 7  # inside the third window of the first epoch, which has 12 micro-batches a rank
WINDOW = 6  # where that window begins: another number of ranks has other gradients
WITHIN_S = 280


class Job:
    """A finished driver: its result, and the lines of its workers."""

    def __init__(self, folder, **config):
        self.folder = folder
        self.config = {
            "names": ["a"],
            "traces": str(folder / "traces"),
            "storage": str(folder / "storage"),
            "every": "1 step",
            **config,
        }
        self.result, self.log = drive(folder, self.config)
        for result in self.result.values():
            assert "error" not in result, result

    def lines(self, rank, name="a"):
        text = (self.folder / "traces" / name / f"rank{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def attempts(self, rank=0, name="a"):
        return [line for line in self.lines(rank, name) if "begun" in line]

    def trained(self, rank, name="a"):
        """The micro-batches by their number; a repeated one has to be the same."""
        trained = {}
        for line in self.lines(rank, name):
            if "number" in line:
                assert trained.setdefault(line["number"], line) == line
        return trained

    def end(self, rank, name="a"):
        return self.lines(rank, name)[-1]

    def run(self, name="a"):
        return self.folder / "storage" / name / "trainckpt"

    def outcome(self, attempt, name="a"):
        return json.loads((self.run(name) / "attempts" / f"{attempt}.json").read_text())["outcome"]


def drive(folder, config):
    """Run the driver; return its result, and all that it and its workers printed."""
    stdout, stderr = in_a_cluster(folder, ["-m", "tests.integrations.ray_job", json.dumps(config)])
    lines = [line for line in stdout.splitlines() if line.startswith('{"')]
    assert lines, stdout[-5000:]
    return json.loads(lines[-1]), stdout + stderr


def in_a_cluster(folder, arguments):
    """Run a driver; every process of its cluster has to be gone afterwards."""
    short = tempfile.mkdtemp(prefix="r", dir="/tmp")  # paths of sockets may have 107 bytes
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRAINCKPT_")},
        "HOME": str(home),
        "RAY_TMPDIR": short,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "default",
    }
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        left = processes_of(home)
        assert psutil.wait_procs(left, timeout=20)[1] == []
    finally:
        for process in processes_of(home):
            process.kill()
        shutil.rmtree(short, ignore_errors=True)
    return done.stdout, done.stderr


def processes_of(home):
    """The processes of a cluster: only they have this home."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("straight"))
    assert [len(job.trained(rank)) for rank in range(2)] == [EPOCHS * ITEMS // 4] * 2
    return job


def assert_same(job, straight):
    for rank in range(2):
        assert job.trained(rank) == straight.trained(rank)
        assert job.end(rank) == straight.end(rank)


def test_ray_s_own_checkpoints_repeat_the_samples_and_not_the_losses(tmp_path, straight):
    """The row beside ours in docs/exactness.md."""
    job = Job(tmp_path, own_checkpoints=True, fault="kill", at=AT, rank=1, max_failures=1)
    samples = losses = trained = 0
    for rank in range(2):
        lines, whole = job.lines(rank), straight.trained(rank)
        first, last = (number for number, line in enumerate(lines) if "begun" in line)
        assert lines[first]["begun"] == 0
        assert lines[last]["begun"] in (WINDOW - 3, WINDOW)  # Ray may not have noted the newest
        for line in lines[last + 1 : -1]:
            trained += 1
            samples += line["ids"] == whole[line["number"]]["ids"]
            losses += line["loss"] == whole[line["number"]]["loss"]
    assert trained >= 36
    assert (samples, losses) == (trained, 0)


def test_a_killed_worker_costs_no_micro_batch_after_the_last_save(tmp_path, straight):
    job = Job(tmp_path, fault="kill", at=AT, rank=1, max_failures=1)
    assert_same(job, straight)
    assert [one["begun"] for one in job.attempts()] == [0, WINDOW]  # of the last step, and not cold
    for false_alarm in ("supervisor", "cannot listen", "was alive"):
        assert false_alarm not in job.log


def test_a_drained_node_is_left_before_its_deadline_for_a_spare_one(tmp_path, straight):
    job = Job(tmp_path, nodes=3, fault="drain", at=AT, rank=1, grace=60.0, every="1000 steps")
    assert_same(job, straight)
    first, second = job.attempts(1)
    assert second["begun"] == AT + 1  # the next micro-batch: nothing was trained twice
    drained = first["node"]
    assert drained not in {job.attempts(rank)[1]["node"] for rank in range(2)}
    outcome = job.outcome(1)
    assert outcome["outcome"] == "stopped"
    assert outcome["lost_micro_batches"] == 0
    assert "Ray" in outcome["reason"]
    assert outcome["seconds"] < 60.0
    assert "the script has changed" not in job.log


def test_without_a_spare_node_fewer_workers_train_each_sample_once(tmp_path):
    job = Job(tmp_path, nodes=2, num_workers=[1, 2], fault="drain", at=AT, rank=1, own_sampler=True)
    assert len(job.attempts(1)) == 1
    assert [one["begun"] for one in job.attempts(0)] == [0, WINDOW]
    assert sorted(samples_after_drops(job)) == sorted(list(range(ITEMS)) * EPOCHS)


def samples_after_drops(job):
    """The samples trained, without those of the window that the second attempt began anew."""
    samples = []
    for rank in range(2):
        attempt = 0
        for line in job.lines(rank):
            attempt += "begun" in line
            if "number" in line and (attempt == 2 or line["number"] < WINDOW):
                samples += line["ids"]
    return samples


def test_a_pause_ends_the_run_without_a_restart_and_the_next_fit_resumes(tmp_path, straight):
    paused = Job(tmp_path, fault="pause", at=AT, max_failures=2, every="1000 steps")
    assert len(paused.attempts()) == 1
    assert paused.outcome(1)["reason"] == "trainckpt pause"
    resumed = Job(tmp_path)
    assert [one["begun"] for one in resumed.attempts()] == [0, AT + 1]
    for rank in range(2):
        assert resumed.trained(rank) == straight.trained(rank)


def test_two_trials_at_once_resume_apart_and_keep_what_ray_keeps(tmp_path):
    job = Job(
        tmp_path,
        names=["a", "b"],
        num_workers=1,
        reports=True,
        num_to_keep=1,
        fault="kill",
        at=28,  # in the second epoch, after a report
        rank=0,
        max_failures=1,
        options={"keep_last": 1},
    )
    assert job.trained(0, "a") == job.trained(0, "b")
    for name in job.config["names"]:
        assert [one["begun"] for one in job.attempts(0, name)] == [0, 27]
        assert job.result[name]["metrics"]["epoch"] == EPOCHS - 1
        (checkpoint,) = job.result[name]["checkpoints"]
        assert sum(file.stat().st_size for file in Path(checkpoint).iterdir()) < 1024
        run, snapshot = read_pointer(Path(checkpoint))
        assert Path(run) == job.run(name)
        assert (Path(run) / "snapshots" / snapshot / "manifest.json").exists()


def test_two_trials_of_a_tuner_at_once_resume_apart_and_name_their_snapshots(tmp_path):
    job = Job(
        tmp_path,
        tuner=True,
        names=["a", "b"],
        num_workers=1,
        reports=True,
        num_to_keep=1,
        fault="kill",
        at=28,
        rank=0,
        max_failures=1,
        options={"keep_last": 1},
    )
    assert job.trained(0, "a") == job.trained(0, "b")
    for name in job.config["names"]:
        assert [one["begun"] for one in job.attempts(0, name)] == [0, 27]
        metrics = job.result[name]["metrics"]
        assert metrics["epoch"] == EPOCHS - 1
        run, snapshot = read_pointer(Path(metrics["checkpoint_path"]))
        assert Path(run) == job.run(name)
        assert (Path(run) / "snapshots" / snapshot / "manifest.json").exists()
    assert job.result["best"]["name"] in job.config["names"]


def test_a_run_in_an_object_store_resumes_there_and_keeps_what_ray_keeps(
    tmp_path, straight, moto_server, at
):
    at(moto_server)
    job = Job(
        tmp_path,
        storage=f"s3://{BUCKET}/{tmp_path.name}",
        every="3 steps",
        reports=True,
        num_to_keep=1,
        fault="kill",
        at=19,  # in the second epoch, after a report
        rank=1,
        max_failures=1,
        options={"keep_last": 1},
    )
    assert_same(job, straight)
    assert [one["begun"] for one in job.attempts()] == [0, 18]
    assert len(job.result["a"]["checkpoints"]) == 1
    named = job.result["a"]["named"]
    assert named.startswith(f"s3://{BUCKET}/{tmp_path.name}/a/trainckpt@")
    weights = trainckpt.load(named, only="model/*").values()
    sums = [tensor.double().sum().item().hex() for tensor in weights]
    assert sorted(sums) == sorted(straight.end(0)["weights"])


def test_checkpoints_are_read_through_ray_s_own_file_system(tmp_path):
    with pointer_to("run", "s1~1.1") as checkpoint:
        shutil.copytree(checkpoint.path, tmp_path / "a")
    (tmp_path / "own").mkdir()
    files = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    good, own, gone = (Checkpoint(name, files) for name in ("a", "own", "gone"))
    assert ReportedSnapshots("run").read([good, own]) == {"s1~1.1"}
    assert ReportedSnapshots("run").read([good, own, gone]) is None


def blocks_of_the_page(place):
    """Its job, and the Tuner that goes on from it, with results in another folder."""
    page = (ROOT / "docs/ray.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    job, tuner = (block for block in blocks if "TorchTrainer(" in block)
    return [block.replace("/tmp/ray-results", str(place)) for block in (job, tuner)]


def test_the_job_of_the_page_runs_as_it_stands_and_again(tmp_path):
    script, place = tmp_path / "job.py", tmp_path / "results"
    script.write_text(blocks_of_the_page(place)[0])
    losses = [in_a_cluster(tmp_path, [str(script)])[0].splitlines()[-1] for _ in range(2)]
    assert float(losses[0]) > 0
    assert losses[0] == losses[1]  # the second finds the run finished
    assert len(list((place / "gpt" / "trainckpt" / "attempts").glob("*.json"))) == 2


def test_the_tuner_of_the_page_runs_as_it_stands(tmp_path):
    script, place = tmp_path / "job.py", tmp_path / "results"
    script.write_text("".join(blocks_of_the_page(place)))
    named = in_a_cluster(tmp_path, [str(script)])[0].splitlines()[-1]
    run, snapshot = named.split("@")
    assert Path(run).parent.name in ("lr-0.001", "lr-0.01")
    assert (Path(run) / "snapshots" / snapshot / "manifest.json").exists()
