"""torchtitan trains under trainckpt's manager, is killed and stopped, and is the uninterrupted run.

Two ranks under FSDP2, with windows of 3 micro-batches, in an environment of its own: `make
torchtitan`. The uninterrupted run has no checkpoints at all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.titan_job import STEPS

PYTHON = Path(sys.prefix) / "torchtitan" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make torchtitan` was not run"),
]

ROOT = Path(__file__).parents[2]
OVERRIDE = "trainckpt.torchtitan.checkpoint_manager"
WINDOW = 3
AT = 7  # the second micro-batch of the third window
WITHIN_S = 200


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    make = "import sys, pathlib; from tests.integrations.titan_job import make_assets as m; "
    code = [PYTHON, "-c", make + "m(pathlib.Path(sys.argv[1]))", str(folder)]
    subprocess.run(code, check=True, cwd=ROOT, timeout=WITHIN_S)
    return folder


class Job:
    """One run in a folder: its starts, and the lines of its ranks."""

    def __init__(self, folder, assets):
        self.folder, self.assets = folder, assets
        self.run = folder / "outputs" / "checkpoint"
        self.log = ""

    def start(self, *arguments, nproc=2, code=0, own=False, **variables):
        """Train by torchrun; `own`: with torchtitan's own checkpoints, or none."""
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return self.call([*torchrun, *command(arguments, own=own)], code, variables)

    def call(self, arguments, code=0, variables=()):
        environment = {
            **{name: v for name, v in os.environ.items() if not name.startswith("TRAINCKPT_")},
            "TITAN_ASSETS": str(self.assets),
            "TITAN_TRACE": str(self.folder / "trace"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            **dict(variables),
        }
        done = subprocess.run(
            [PYTHON, *map(str, arguments)],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        self.log = done.stdout + done.stderr
        assert done.returncode == code, self.log[-5000:]
        return self

    def lines(self, name):
        return [
            json.loads(line)
            for line in (self.folder / "trace" / name).read_text().split("\n")
            if line
        ]

    def trained(self, rank):
        """The micro-batches by their number; a repeated one has to be the same."""
        trained = {}
        for line in self.lines(f"rank{rank}.jsonl"):
            assert trained.setdefault(line["number"], line) == line
        return trained

    def metrics(self, rank):
        """The last metrics of each step."""
        return {line["step"]: line for line in self.lines(f"metrics{rank}.jsonl")}

    def snapshots(self):
        """The ids of the snapshots that a resume may use, the newest first."""
        done = self.call(["-m", "trainckpt", "list", self.run, "--json"])
        found = json.loads(done.log[done.log.index("{") :])["candidates"]
        return [each["id"] for each in found if each["usable"]]

    def resumed_from(self, attempt):
        return json.loads((self.run / "attempts" / f"{attempt}.json").read_text())["parent"]


def command(arguments, *, own=False):
    ours = [] if own else ["--checkpoint.enable", "--override.imports", OVERRIDE]
    module = ["-m", "tests.integrations.titan_job", "--module", "tests.integrations.titan_job"]
    return [*module, "--config", "small", "--debug.seed", "0", *ours, *arguments]


def fault(kind, rank, at=AT):
    return json.dumps({"signal": kind.name, "rank": rank, "at": at})


def assert_same(job, straight):
    for rank in range(2):
        assert job.trained(rank) == straight.trained(rank)
        assert job.metrics(rank) == straight.metrics(rank)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, assets):
    job = Job(tmp_path_factory.mktemp("straight"), assets).start(own=True)
    for rank in range(2):
        trained = job.trained(rank)
        assert sorted(trained) == list(range(STEPS * WINDOW))
        assert len({line["loss"] for line in trained.values()}) == len(trained)  # none is like cold
    return job


def test_a_signal_to_one_rank_inside_a_window_and_trainckpt_resume(tmp_path, assets, straight):
    job = Job(tmp_path, assets)
    run = ["-m", "trainckpt", "run", "--nproc", "2", *command([])]
    job.call(run, 75, {"TITAN_FAULT": fault(signal.SIGTERM, 1), "TRAINCKPT_STOP_AT": "micro-batch"})
    assert len(job.trained(0)) == AT + 1
    job.call(["-m", "trainckpt", "resume", job.run])
    assert job.resumed_from(2) == "s2m2~1.1"
    assert "as exact as HuggingFaceTextDataLoader's own state" in job.log
    assert [len(job.lines(f"rank{rank}.jsonl")) for rank in range(2)] == [STEPS * WINDOW] * 2
    assert_same(job, straight)


def test_a_killed_rank_costs_what_was_trained_since_the_last_save(tmp_path, assets, straight):
    job = Job(tmp_path, assets)
    job.start("--checkpoint.interval=1", code=1, TITAN_FAULT=fault(signal.SIGKILL, 1))
    job.start("--checkpoint.interval=1")
    assert job.resumed_from(2) == "s2~1.2"
    assert len(job.lines("rank0.jsonl")) == STEPS * WINDOW + AT + 1 - 2 * WINDOW
    assert_same(job, straight)


def test_torchtitan_s_own_checkpoint_has_the_samples_and_not_the_losses(tmp_path, assets, straight):
    job = Job(tmp_path, assets)
    keys = [
        "--checkpoint.enable",
        "--checkpoint.interval=1",
        "--checkpoint.no-last-save-model-only",
    ]
    job.start(*keys, own=True, code=1, TITAN_FAULT=fault(signal.SIGKILL, 1))
    job.start(*keys, own=True)
    for rank in range(2):
        whole, resumed = straight.trained(rank), job.lines(f"rank{rank}.jsonl")[-12:]
        assert [line["number"] for line in resumed] == list(range(2 * WINDOW, STEPS * WINDOW))
        assert all(line["tokens"] == whole[line["number"]]["tokens"] for line in resumed)
        assert not any(line["loss"] == whole[line["number"]]["loss"] for line in resumed)


def test_validations_and_workers_are_exact_too(tmp_path, assets):
    more = ["--validator.enable", "--dataloader.num-workers=2"]
    (tmp_path / "straight").mkdir()
    (tmp_path / "stopped").mkdir()
    straight = Job(tmp_path / "straight", assets).start(*more, own=True)
    job = Job(tmp_path / "stopped", assets)
    stop = {"TITAN_FAULT": fault(signal.SIGTERM, 0, 4 * WINDOW), "TRAINCKPT_STOP_AT": "micro-batch"}
    job.start(*more, code=1, **stop)
    job.start(*more)
    assert job.resumed_from(2) == "s4m1~1.1"
    assert_same(job, straight)


def test_ranks_that_share_their_data_resume_under_tensor_parallelism(tmp_path, assets):
    more = ["--parallelism.tensor-parallel-degree=2"]
    (tmp_path / "straight").mkdir()
    (tmp_path / "stopped").mkdir()
    straight = Job(tmp_path / "straight", assets).start(*more, own=True)
    job = Job(tmp_path / "stopped", assets)
    stop = {"TITAN_FAULT": fault(signal.SIGTERM, 0), "TRAINCKPT_STOP_AT": "micro-batch"}
    job.start(*more, code=1, **stop)
    job.start(*more)
    assert job.resumed_from(2) == "s1m2~1.1"  # of 6: one data-parallel rank
    assert_same(job, straight)


def test_other_ranks_and_another_window_are_refused(tmp_path, assets):
    job = Job(tmp_path, assets)
    stop = {"TITAN_FAULT": fault(signal.SIGTERM, 0), "TRAINCKPT_STOP_AT": "micro-batch"}
    job.start(code=1, **stop)
    job.start(nproc=1, code=1)
    assert "as many data-parallel ranks as the run had" in job.log
    job.start("--training.global-batch-size=8", code=1)
    assert "micro-batches of a window was 3, is 2" in job.log
    job.start("--training.global-batch-size=8", "--training.local-batch-size=1", code=1)
    assert "training.local_batch_size was 2, is 1" in job.log
    assert len(job.trained(0)) == AT + 1


def test_other_data_in_the_window_that_is_fetched_again_are_named(tmp_path, assets):
    own = tmp_path / "assets"
    shutil.copytree(assets, own)
    job = Job(tmp_path, own)
    stop = {"TITAN_FAULT": fault(signal.SIGTERM, 0), "TRAINCKPT_STOP_AT": "micro-batch"}
    job.start(code=1, **stop)
    texts = own / "texts.jsonl"
    texts.write_text(texts.read_text().replace("a", "b"))
    job.start()
    assert "the open window has other batches now" in job.log
    assert "as exact as HuggingFaceTextDataLoader's own state" not in job.log


def test_snapshots_are_made_kept_and_chosen_by_the_keys(tmp_path, assets, straight):
    job = Job(tmp_path, assets)
    job.start("--checkpoint.interval=4", "--checkpoint.enable-first-step-checkpoint")
    assert job.snapshots()[:2] == ["s6", "s4"]
    assert job.snapshots()[2] in ("s1", "s1m1")  # at the first boundary on which the ranks agree
    weights = job.run / "step-6"
    assert (weights / ".metadata").exists()  # last_save_model_only
    job.start("--checkpoint.interval=1", "--checkpoint.keep-latest-k=2", "--checkpoint.load-step=4")
    assert job.resumed_from(2) == "s4~1.2"
    assert job.snapshots() == ["s6", "s5"]
    assert_same(job, straight)
    job.start("--checkpoint.interval=1")  # finished
    assert_same(job, straight)
    lines = len(job.lines("rank0.jsonl"))
    for _ in range(2):
        job.start("--checkpoint.load-step=5")  # the second start goes on from the first one's end
        assert len(job.lines("rank0.jsonl")) == lines + WINDOW
    assert "attempt 4 has begun there, and is continued" in job.log
    assert_same(job, straight)
    job.start("--checkpoint.interval=1", "--training.steps=7")
    assert sorted(job.trained(0)) == list(range(7 * WINDOW))


def test_a_run_begins_with_another_checkpoint_and_not_beside_one(tmp_path, assets, straight):
    jobs = {name: Job(tmp_path / name, assets) for name in ("own", "whole", "weights", "ours")}
    for job in jobs.values():
        job.folder.mkdir()
    whole = "--checkpoint.no-last-save-model-only"
    jobs["own"].start("--checkpoint.enable", "--checkpoint.interval=3", whole, own=True)
    jobs["own"].start(code=1)
    step = jobs["own"].run / "step-3"
    assert "the newest step-6, and no run of trainckpt" in jobs["own"].log
    assert "initial_load_model_only=False" in jobs["own"].log

    begin = f"--checkpoint.initial-load-path={step}"
    jobs["whole"].start(begin, "--checkpoint.no-initial-load-model-only")
    trained = jobs["whole"].trained(0)
    assert sorted(trained) == list(range(3 * WINDOW, 6 * WINDOW))
    assert jobs["whole"].snapshots() == ["s6"]
    tokens = straight.trained(0)
    assert all(line["tokens"] == tokens[n]["tokens"] for n, line in trained.items())

    jobs["weights"].start(begin)
    first = jobs["weights"].trained(0)[0]
    assert first["tokens"] == tokens[0]["tokens"]
    assert first["loss"] != tokens[0]["loss"]

    jobs["ours"].start(f"--checkpoint.initial-load-path={jobs['whole'].run}@s6")
    again = jobs["ours"].trained(0)[0]
    assert again["tokens"] == first["tokens"]
    assert again["loss"] not in (first["loss"], tokens[0]["loss"])


def test_data_that_run_out_end_the_run_and_nothing_is_trained_again(tmp_path, assets):
    job = Job(tmp_path, assets)
    more = ["--dataloader.no-infinite", "--training.steps=100"]
    job.start(*more)
    trained = job.trained(0)
    steps = len(trained) // WINDOW
    assert STEPS < steps < 100
    assert job.snapshots()[0] == f"s{steps}"
    job.start(*more)
    assert "last step was canceled" in job.log
    assert job.trained(0) == trained


# ---- keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "run" / "attempts").mkdir(parents=True)
    done = subprocess.run(
        [PYTHON, "-m", "tests.integrations.titan_keys", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "folder": str(folder)}


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("seed", "create_seed_checkpoint"),
        ("load only", "load_only"),
        ("excluded at a resume", "exclude_from_loading"),
        ("excluded of a run", "exclude_from_loading"),
        ("a whole run", "initial_load_model_only"),
        ("a run in another format", "initial_load_in_hf"),
        ("kept twice", "keep_last"),
        ("no option", "evry"),
        ("another manager", "quorum"),
        ("own step", "train_step"),
        ("own state", "its own state_dict"),
        ("own loop", "a loop of its own"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name_with_what_to_do(keys, case, named):
    assert named in keys[case]["refused"]
    assert keys[case]["next"]


def test_the_others_become_options(keys):
    plain = {"every": "7 steps", "keep_last": 10}
    for case in ("as it is", "async_mode async", "async_mode async_with_pinned_mem"):
        assert keys[case] == plain
    assert keys["excluded at the beginning"] == plain
    assert keys["all are kept"] == {**plain, "keep_last": 10**6}
    assert keys["by the clock"] == {**plain, "every": "10 min"}
    assert keys["a snapshot"] == {**plain, "init_from": f"{keys['folder']}/run@s3"}
    assert keys["torchtitan's own"] is None


def test_every_key_stands_on_the_page_whose_job_is_torchtitan_s(keys):
    page = (ROOT / "docs/torchtitan.md").read_text(encoding="utf-8")
    table = page.partition("## The keys of checkpoint")[2].partition("## How exact")[0]
    assert [name for name in keys["fields"] if f"`{name}`" not in table] == []
    assert keys["the page's command"] == ["TorchtitanManager.Config", 100]
    assert keys["the page's module"]["stop_at"] == "micro-batch"
