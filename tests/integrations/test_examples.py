"""The examples of the guides are run, stopped inside a window, and resumed to the same trace."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import trainckpt
from tests.integrations.struck import strike

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, ACCUMULATE, STRIKE_AT = 3, 3, 4  # one micro-batch into the second window

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.mark.parametrize("name", ["accelerate_gpt", "transformers_gpt", "lora_gpt"])
def test_an_example_stopped_and_started_again_trains_what_it_would_have(
    name, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("trainckpt.lifecycle.departure.exit_soon", lambda *_: None)
    threads = torch.get_num_threads()
    example = importlib.import_module(name)

    def run(place, strike_at=None):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        flags = ["--steps", STEPS, "--accumulate", ACCUMULATE, "--workers", 0]
        argv = [name, "--run", place / "run", "--trace", place / "trace", *flags]
        monkeypatch.setattr(sys, "argv", [str(part) for part in argv])
        with Struck(strike_at):
            example.main()

    try:
        run(tmp_path / "straight")
        with pytest.raises(trainckpt.Stopped):
            run(tmp_path / "stopped", STRIKE_AT)
        run(tmp_path / "stopped")
    finally:
        torch.set_num_threads(threads)
    for file in ("rank0.jsonl", "final0.json"):
        straight = (tmp_path / "straight/trace" / file).read_bytes()
        assert (tmp_path / "stopped/trace" / file).read_bytes() == straight, file
    assert straight
    lines = (tmp_path / "stopped/trace/attempts.jsonl").read_text().splitlines()
    assert '"micro": 1' in lines[1]


class Struck:
    """For the length of a with statement: SIGTERM after so many micro-batches of the trace."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __enter__(self):
        import training_trace

        self.kind = training_trace.Trace
        self.attempt, self.micro_batch = self.kind.attempt, self.kind.micro_batch

        def attempt(trace, ckpt):
            self.ckpt = ckpt
            self.attempt(trace, ckpt)

        def micro_batch(trace, *line):
            self.micro_batch(trace, *line)
            self.seen += 1
            if self.seen == self.at:
                strike(self.ckpt)

        self.kind.attempt, self.kind.micro_batch = attempt, micro_batch

    def __exit__(self, *_):
        self.kind.attempt, self.kind.micro_batch = self.attempt, self.micro_batch
