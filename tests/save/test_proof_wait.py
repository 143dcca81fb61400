"""Proofs of copies made beside training wait for a step only so long."""

from __future__ import annotations

from functools import partial

import pytest

from tests.end_to_end import waiting
from tests.end_to_end.training import usable
from tests.ranks.processes import preload, run_ranks

preload("tests.end_to_end.waiting")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_trains_on_when_its_file_is_written_as_others_prove_their_copies(
    tmp_path, rank
):
    program = partial(waiting.save_at_each_step, streams=rank, waits=None)
    results = run_ranks(program, 2, str(tmp_path / "run"))
    assert [errors for errors, _ in results] == [[], []]
    assert results[rank][1] == 0
    assert results[1 - rank][1] >= 2
    assert len(usable(tmp_path / "run")) == waiting.SAVES + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_training_waits_for_a_save_is_not_waited_for_by_the_others_proofs(
    tmp_path, rank
):
    program = partial(waiting.save_at_each_step, streams=None, waits=rank)
    results = run_ranks(program, 2, str(tmp_path / "run"))
    assert [errors for errors, _ in results] == [[], []]
    assert all(proved >= 2 for _, proved in results)
    assert len(usable(tmp_path / "run")) == waiting.SAVES + 1
