"""The examples of the guides are run, stopped inside a window, and resumed to the same trace."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import trainckpt
from tests.integrations import exampled
from tests.integrations.exampled import EXAMPLES, STRIKE_AT, run
from tests.ranks.processes import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.mark.parametrize("name", ["accelerate_gpt", "transformers_gpt", "lora_gpt"])
def test_an_example_stopped_and_started_again_trains_what_it_would_have(
    name, tmp_path, monkeypatch, stays_when_stopped
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", sys.argv)
    threads = torch.get_num_threads()
    example = importlib.import_module(name)
    try:
        run(example, tmp_path / "straight")
        with pytest.raises(trainckpt.Stopped):
            run(example, tmp_path / "stopped", STRIKE_AT)
        run(example, tmp_path / "stopped")
    finally:
        torch.set_num_threads(threads)
    assert_the_same(tmp_path, 1)


def test_all_ranks_of_an_example_leave_with_75_and_train_what_they_would_have(tmp_path):
    """Under the Trainer's DDP; SIGTERM to one of them."""
    found = run_ranks(exampled.on_ranks, 2, 2, "transformers_gpt", tmp_path)
    assert found == [("exit", 75)] * 2
    assert_the_same(tmp_path, 2)
    for rank in range(2):
        assert (tmp_path / f"left/trace/rank{rank}.jsonl").read_bytes().count(b"\n") == STRIKE_AT


def assert_the_same(folder, ranks):
    """The traces and ends of the stopped run and of the straight one; resumed inside a window."""
    for file in [f for r in range(ranks) for f in (f"rank{r}.jsonl", f"final{r}.json")]:
        straight = (folder / "straight/trace" / file).read_bytes()
        assert straight
        assert (folder / "stopped/trace" / file).read_bytes() == straight, file
    lines = (folder / "stopped/trace/attempts.jsonl").read_text().splitlines()
    assert '"micro": 1' in lines[1]
