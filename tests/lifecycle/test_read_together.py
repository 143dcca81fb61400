"""Real ranks that hold columns read rows between them: to the bit, few bytes, and no rank waits."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.lifecycle import together
from tests.ranks.processes import preload, run_ranks

preload("tests.lifecycle.ranks", "tests.lifecycle.together")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs of two ranks with two snapshots each, and the state at each of them."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(together.save, 2, str(folder))[0]


@pytest.fixture
def place(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "runs")
    return str(tmp_path / "runs")


def test_ranks_that_hold_columns_read_each_byte_once_between_them(saved, place):
    """Tensor parallel from anything, beside FSDP, in one stage of a pipeline; and rows as ever."""
    everyone = run_ranks(together.resume_in_columns, 4, place)
    groups = {"tp": [(0, 1, 2, 3)], "tp x fsdp": [(0, 1), (2, 3)], "rows": []}
    for rank, results in enumerate(everyone):
        step, is_equal, ratio, found = results.pop("pipeline")
        assert (step, is_equal) == (2, True)
        assert found == ([(0, 1)] if rank < 2 else [])
        assert ratio < 1.1
        _, state, ratio, found = results.pop("tp, no network")
        assert (state, found) == (saved[1]["fsdp"][-1], [(0, 1, 2, 3)])
        assert ratio > 2  # whole rows
        _, state, ratio, found = results.pop("tp, no agreement")
        assert (state, found) == (saved[1]["fsdp"][-1], [])
        assert ratio > 2
        for name, (step, state, ratio, found) in results.items():
            way, _, kind = name.partition(" from ")
            assert step == 2, name
            assert state == saved[1][kind or "fsdp"][-1], name
            assert ratio < 1.1, (name, ratio)  # headers and values included: the model is small
            assert found == [g for g in groups[way] if rank in g], name


def test_a_damaged_block_makes_all_ranks_take_the_older_snapshot(saved, place):
    everyone = run_ranks(together.resume_damaged, 3, place)
    messages = {result[3] for result in everyone}
    assert len(messages) == 1
    for step, state, error, message in everyone:
        assert (step, state) == (1, saved[1]["ddp"][0])
        assert error == "NoUsableSnapshot"
        assert "(2 examined)" in message
        assert re.search(r"s2~1\.2: rank 1: \S+: values\.json does not match its digest\n", message)
        last = message.partition("s1~1.1: rank ")[2]
        assert re.match(r"\d: \S+safetensors: model/1\.weight\S* does not match its digest$", last)


def test_the_death_of_a_member_is_an_error_to_the_others_and_no_hang(place):
    one, two, three = run_ranks(together.die_while_reading, 3, place)
    assert two == ("exit", 9)
    for told in (one, three):
        assert told[0] == "NoAgreement"
        assert "while they read together" in told[1]
