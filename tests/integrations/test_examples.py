"""The examples of the guides are run, stopped inside a window, and resumed to the same trace."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainckpt
from tests.integrations import example_runs
from tests.integrations.example_runs import EXAMPLES, STEPS, STRIKE_AT, flags_of, run
from tests.limits import HANG_S
from tests.ranks.processes import run_ranks

GATE = Path(__file__).parents[1] / "campaign/gate.py"

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture
def example(request, monkeypatch):
    """An example by its name, imported; what it changes in this process is undone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", sys.argv)
    if request.param == "rl_dqn":
        pytest.importorskip("gymnasium")
    threads = torch.get_num_threads()
    yield importlib.import_module(request.param)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("example", "strike_at"),
    [
        ("accelerate_gpt", STRIKE_AT),
        ("transformers_gpt", STRIKE_AT),
        ("lora_gpt", STRIKE_AT),
        ("stream_gpt", STRIKE_AT),
        ("rl_dqn", 30),
    ],
    indirect=["example"],
)
@pytest.mark.usefixtures("stays_when_stopped")
def test_an_example_stopped_and_started_again_trains_what_it_would_have(
    example, strike_at, tmp_path
):
    run(example, tmp_path / "straight")
    with pytest.raises(trainckpt.Stopped):
        run(example, tmp_path / "stopped", strike_at)
    run(example, tmp_path / "stopped")
    assert_the_same(tmp_path, 1, micro=0 if example.__name__ == "rl_dqn" else 1)
    if example.__name__ == "stream_gpt":
        events = EventAccumulator(str(tmp_path / "stopped/logs"))
        events.Reload()
        assert [event.step for event in events.Scalars("loss")] == list(range(STEPS))


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", ["lora_gpt", "lora_gpt --peft", "stream_gpt", "rl_dqn"])
def test_an_example_that_gets_a_signal_goes_on_as_if_it_had_not(name, signum, tmp_path):
    name, *more = name.split()
    if more:
        pytest.importorskip("peft")
    more += ["--save-every", "10" if name == "rl_dqn" else "1"]
    strike_at = 30 if name == "rl_dqn" else STRIKE_AT

    def start(place, gate="0,/"):
        """Start it; after some micro-batches it waits for a file: "4,/tmp/open"."""
        command = [sys.executable, GATE, EXAMPLES / f"{name}.py", *flags_of(name, place), *more]
        environment = {**os.environ, "CAMPAIGN_GATE": gate, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([str(part) for part in command], env=environment)

    assert start(tmp_path / "straight").wait(HANG_S) == 0
    place, opened = tmp_path / "struck", tmp_path / "open"
    process = start(place, f"{strike_at},{opened}")
    until_trained_and_saved(process, place, strike_at)
    process.send_signal(signum)
    opened.touch()
    assert process.wait(HANG_S) == (75 if signum == signal.SIGTERM else -signum)
    assert start(place).wait(HANG_S) == 0
    assert begun(place)[1] is not None
    assert trained(place) == trained(tmp_path / "straight")


def until_trained_and_saved(process, place, micro_batches):
    trace, limit = place / "trace/rank0.jsonl", time.monotonic() + HANG_S
    while not (
        trace.exists()
        and trace.read_bytes().count(b"\n") >= micro_batches
        and [*place.glob("run/snapshots/s*/manifest.json")]
    ):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)


def trained(place):
    """What a run has trained, and its end. A killed one trains some again: to the bit, so once."""
    lines = (place / "trace/rank0.jsonl").read_text().splitlines()
    return list(dict.fromkeys(lines)), (place / "trace/final0.json").read_text()


def begun(place):
    """Where each attempt of a run went on."""
    lines = (place / "trace/attempts.jsonl").read_text().splitlines()
    return [json.loads(line)["resumed_from"] for line in lines]


def test_all_ranks_of_an_example_leave_with_75_and_train_what_they_would_have(tmp_path):
    """Under the Trainer's DDP; SIGTERM to one of them."""
    found = run_ranks(example_runs.on_ranks, 2, 2, "transformers_gpt", tmp_path)
    assert found == [("exit", 75)] * 2
    assert_the_same(tmp_path, 2)
    for rank in range(2):
        assert (tmp_path / f"left/trace/rank{rank}.jsonl").read_bytes().count(b"\n") == STRIKE_AT


def assert_the_same(folder, ranks, micro=1):
    """The traces and ends of the stopped run and of the straight one; resumed inside a window."""
    for file in [f for r in range(ranks) for f in (f"rank{r}.jsonl", f"final{r}.json")]:
        straight = (folder / "straight/trace" / file).read_bytes()
        assert straight
        assert (folder / "stopped/trace" / file).read_bytes() == straight, file
    assert begun(folder / "stopped")[1]["micro"] == micro
