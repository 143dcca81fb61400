"""Ranks that each have layers of their own: a resume compares each with what it had itself."""

from __future__ import annotations

import pytest

from tests.end_to_end import stages
from tests.ranks.processes import preload, run_ranks

preload("tests.end_to_end.stages")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two stages, stopped after its third step."""
    place = tmp_path_factory.mktemp("stages") / "run"
    run_ranks(stages.train, 2, str(place), 3)
    return str(place)


def test_stages_of_a_pipeline_resume_exactly_on_as_many_ranks(run, tmp_path):
    straight = run_ranks(stages.train, 2, str(tmp_path / "straight"), 5)
    resumed = run_ranks(stages.train, 2, run, 5)
    for whole, rest in zip(straight, resumed, strict=True):
        assert rest == {number: whole[number] for number in (3, 4)}


OF_ANOTHER = (
    "was another rank's alone: it goes on only on the rank that had it, and on as many ranks"
)


@pytest.mark.parametrize(
    ("size", "swapped", "gone"), [(1, False, ""), (2, True, "is gone: only the snapshot has it")]
)
def test_another_ranks_stage_is_refused_as_that(run, size, swapped, gone):
    for differences, hint in run_ranks(stages.train, size, run, 9, swapped):
        said = [
            *(f"model/s0.{part} {gone}" for part in ("bias", "weight") if gone),
            *(f"model/s1.{part} {OF_ANOTHER}" for part in ("bias", "weight")),
        ]
        assert [line for line in differences if line.startswith("model/")] == said
        assert hint.startswith("run the script as it was")
