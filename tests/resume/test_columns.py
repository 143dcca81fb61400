"""Real ranks that hold columns of a matrix resume to the bit."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.end_to_end import columns
from tests.ranks.processes import preload, run_ranks

preload("tests.end_to_end.ranks", "tests.end_to_end.columns")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs of two ranks with two snapshots each, and the state at each of them."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(columns.save, 2, str(folder))[0]


@pytest.fixture
def place(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "runs")
    return str(tmp_path / "runs")


def test_ranks_that_hold_columns_resume_from_any_layout_to_the_bit(saved, place):
    """Tensor parallel from anything, beside FSDP, in one stage of a pipeline; and rows as ever."""
    for results in run_ranks(columns.resume_in_columns, 4, place):
        assert results.pop("pipeline") == (2, True)
        for name, (step, state) in results.items():
            kind = name.partition(" from ")[2] or "fsdp"
            assert (step, state) == (2, saved[1][kind][-1]), name


def test_a_damaged_block_makes_all_ranks_take_the_older_snapshot(saved, place):
    everyone = run_ranks(columns.resume_damaged, 3, place)
    messages = {result[3] for result in everyone}
    assert len(messages) == 1
    for step, state, error, message in everyone:
        assert (step, state) == (1, saved[1]["ddp"][0])
        assert error == "NoUsableSnapshot"
        assert "(2 examined)" in message
        assert re.search(r"s2~1\.2: rank 1: \S+: values\.json does not match its digest\n", message)
        for reason in message.partition("s1~1.1: ")[2].split("; "):
            assert re.match(
                r"rank \d: \S+safetensors: model/1\.weight\S* does not match its digest$", reason
            )
