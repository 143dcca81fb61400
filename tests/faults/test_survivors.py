"""Ranks that die or hang while nothing was saved: the others save, and the run goes on."""

from __future__ import annotations

import pytest

from tests.faults.farm import farm, why_not
from tests.faults.survivors import EXACT, LEFT, MARKED, SIZE, WENT_ON, Case, play, straight
from trainckpt.stop.survivor_setup import says_that_a_rank_is_gone


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    if why_not():
        pytest.skip(why_not())
    with farm(tmp_path_factory.mktemp("farm") / "own", SIZE) as made:
        yield made


@pytest.fixture(scope="module")
def expected(four, tmp_path_factory):
    """What the run that lost nobody was, step by step."""
    return straight(four, tmp_path_factory.mktemp("straight"))


@pytest.mark.parametrize(
    "case",
    [
        Case(partners=True, lost=(0, 2), sealed=True),
        Case(partners=True, lost=(0,), stops=True, wakes=LEFT),
        Case(partners=True, lost=(2,), stops=True, wakes=WENT_ON),
    ],
    ids=str,
)
def test_with_partners_one_step_is_lost_at_most_and_the_run_goes_on_to_the_bit(
    four, expected, tmp_path, case
):
    found = play(four, case, tmp_path, expected)
    assert 0 < found.began <= found.done <= found.began + 1
    assert "(survivors of rank " in found.log
    assert EXACT in found.log
    assert ("snapshots are encrypted to" in found.log) == case.sealed


def test_without_partners_it_is_marked_and_every_sample_is_seen_once(four, expected, tmp_path):
    found = play(four, Case(partners=False, lost=(1,)), tmp_path, expected)
    assert 0 < found.began <= found.done
    assert "), same data, not bitwise" in found.log
    assert MARKED in found.log
    assert "not bitwise: rank 1" in found.log
    assert "died with all that was its own" in found.log


def test_only_an_error_of_a_collective_says_that_a_rank_is_gone():
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]")
    assert says_that_a_rank_is_gone(broken)
    assert not says_that_a_rank_is_gone(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not says_that_a_rank_is_gone(ValueError("gloo"))
