"""DeepSpeed's ZeRO-1 and ZeRO-2, killed and stopped inside a window, are the uninterrupted run.

Each run is torchrun with ranks of its own (`deepspeed_job.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.integrations.deepspeed_job import ACCUMULATE, EPOCHS, ITEMS, KINDS

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests/integrations/deepspeed_job.py"
AT = 8  # the last micro-batch of the third window
WINDOW = 6  # where that window begins: another number of ranks has other gradients
MICRO_BATCHES = EPOCHS * ITEMS // 4  # of each of two ranks
WITHIN_S = 280


class Runs:
    """The runs of one kind of engine. The first attempts are made once; later ones get a copy."""

    def __init__(self, folder, kind):
        self.folder, self.kind = folder / kind, kind
        self.folder.mkdir()
        self.first = cache(self.first)

    def first(self, fault=None):
        """A run from its beginning; with a fault it ends inside a window."""
        at = {"fault": fault, "at": AT} if fault else {}
        folder = self.folder / (fault or "straight")
        failed = launch(folder, 2, kind=self.kind, **at)
        assert bool(failed) == bool(fault), failed
        return folder

    def resumed(self, fault, name, ranks=2, **config):
        """A second attempt of the run that ended so."""
        folder = self.folder / f"{fault} {name}"
        shutil.copytree(self.first(fault), folder)
        failed = launch(folder, ranks, kind=self.kind, **config)
        assert not failed, failed
        return folder


def launch(folder, ranks, **config):
    """Run torchrun in a folder of its own; return its last words if it failed."""
    folder.mkdir(exist_ok=True)
    arguments = {"run": str(folder / "run"), "out": str(folder / "trace"), **config}
    done = torchrun(ranks, JOB, json.dumps(arguments), folder=folder)
    (folder / "log").write_text(done.stderr)
    return (done.stdout + done.stderr)[-3000:] if done.returncode else ""


def torchrun(ranks, *script, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *map(str, script)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINCKPT_")}
    return subprocess.run(
        command,
        env={**kept, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def lines(folder, rank):
    text = (folder / f"trace.rank{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def trained(folder, rank):
    """The micro-batches by their number; a repeated one has to be the same."""
    found = {}
    for line in lines(folder, rank):
        if "number" in line:
            assert found.setdefault(line["number"], line) == line
    return found


def begun(folder):
    return [line["begun"] for line in lines(folder, 0) if "begun" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    return cache(lambda kind: Runs(folder, kind))


@pytest.mark.parametrize("fault", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_inside_a_window_is_the_uninterrupted_one(runs, kind, fault):
    straight, resumed = runs(kind).first(), runs(kind).resumed(fault, "on 2")
    assert begun(resumed) == [0, AT]
    log = (resumed / "log").read_text()
    assert "not exact" not in log
    assert "in no state_dict" not in log
    for rank in range(2):
        assert len(trained(straight, rank)) == MICRO_BATCHES
        assert trained(resumed, rank) == trained(straight, rank)
        assert lines(resumed, rank)[-1] == lines(straight, rank)[-1]
    _, skipped = trained(resumed, 0)[AT - 1]["steps"]
    assert (skipped > 0) == (kind == "zero2-fp16")


@pytest.mark.parametrize("kind", ["zero2", "zero1-bf16", "zero2-bf16", "zero2-bf16-sums"])
def test_without_the_gradients_inside_the_engine_the_run_would_be_another(runs, kind):
    """ZeRO-1 in fp32 has them in `.grad`, as any model."""
    straight = trained(runs(kind).first(), 0)
    folder = runs(kind).resumed("SIGKILL", "without its window", without="apply_window")
    resumed = [line for line in lines(folder, 0) if "number" in line][AT + 1 :]
    assert [line["number"] for line in resumed] == list(range(AT, MICRO_BATCHES))
    assert resumed[0]["loss"] == straight[AT]["loss"]  # the weights are as they were
    assert resumed[0]["norm"] != straight[AT]["norm"]
    assert resumed[1]["loss"] != straight[AT + 1]["loss"]


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_without_the_engine_s_counters_the_window_would_end_elsewhere(runs, kind):
    straight = trained(runs(kind).first(), 0)
    folder = runs(kind).resumed("SIGKILL", "without its counters", without="apply")
    resumed = [line for line in lines(folder, 0) if "number" in line][AT + 1 :]
    assert resumed[0]["loss"] == straight[AT]["loss"]
    assert [line["steps"] for line in resumed] != [
        straight[line["number"]]["steps"] for line in resumed
    ]


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero1-bf16", "zero2-bf16"])
def test_one_rank_goes_on_with_the_weights_and_moments_of_two(runs, kind):
    straight, folder = trained(runs(kind).first(), 0), runs(kind).resumed("SIGKILL", "on 1", 1)
    assert begun(folder) == [0, WINDOW]  # the open window begins anew
    text = (folder / "trace.rank0.jsonl").read_text().partition('{"attempt": 2')[2]
    resumed = [json.loads(line) for line in text.splitlines()[1:]]
    assert resumed[0]["number"] == WINDOW
    assert resumed[0]["before"] == straight[WINDOW]["before"]
    assert resumed[ACCUMULATE - 1]["steps"] == straight[WINDOW + ACCUMULATE - 1]["steps"]
    before = [i for rank in range(2) for n in range(WINDOW) for i in ids_of(folder, rank, n)]
    after = [i for line in resumed if line.get("epoch") == 0 for i in line["ids"]]
    assert sorted(before + after) == list(range(ITEMS))


def ids_of(folder, rank, number):
    return next(line["ids"] for line in lines(folder, rank) if line.get("number") == number)


def test_its_own_checkpoint_drops_what_the_window_has_accumulated(runs, tmp_path):
    """For the table of docs/exactness.md: DeepSpeed saves no gradients and no random numbers."""
    straight, folder = runs("zero2").first(), tmp_path / "own"
    for at in (AT, None):
        failed = launch(folder, 2, kind="zero2", own=True, at=at)
        assert not failed, failed
    equal = {"samples": 0, "losses": 0}
    for rank in range(2):
        then, now = trained(straight, rank), trained(folder, rank)
        for number in range(AT, MICRO_BATCHES):
            equal["samples"] += now[number]["ids"] == then[number]["ids"]
            equal["losses"] += now[number]["loss"] == then[number]["loss"]
    assert equal == {"samples": 2 * (MICRO_BATCHES - AT), "losses": 0}


def test_the_job_of_the_page_runs_as_it_stands_and_again(tmp_path):
    page = (ROOT / "docs/deepspeed.md").read_text(encoding="utf-8")
    job = next(block for block in page.split("```python\n") if "config = {" in block)
    script = tmp_path / "job.py"
    script.write_text(job.partition("```")[0])
    for _ in range(2):  # the second finds the run finished
        done = torchrun(2, script, folder=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((tmp_path / "runs" / "gpt" / "attempts").glob("*.json"))) == 2


def test_engines_that_are_not_exact_are_refused_with_what_to_use(tmp_path):
    done = torchrun(1, JOB, "refusals", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    last = next(line for line in done.stdout.splitlines() if line.startswith("REFUSED "))
    found = json.loads(last.removeprefix("REFUSED "))
    assert found.pop("first weights"), "init_from did not reach the fp32 weights"
    words = {
        "no zero": ("without ZeRO", "ZeRO-2"),
        "zero 3": ("with ZeRO-3", "fully_shard"),
        "offload": ("with ZeRO-Offload", "save_checkpoint"),
        "kernel": ("with FusedAdam on CPUs", "torch_adam"),
        "its optimizer": ("inside a DeepSpeed engine", "leave it out"),
        "the optimizer inside": ("inside the DeepSpeed engine model", "leave it out"),
        "inside": ("model/0 is DeepSpeed's", "plain engine"),
        "load": ("model is a DeepSpeed engine", "before deepspeed.initialize"),
    }
    assert found.keys() == words.keys()
    for name, (why, instead) in words.items():
        assert why in found[name][0], name
        assert instead in found[name][1], name
