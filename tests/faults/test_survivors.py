"""Ranks that die or hang while nothing was saved: the others save, and the run goes on."""

from __future__ import annotations

import pytest

from tests.faults import replicated_training
from tests.faults.farm import farm, why_not
from tests.faults.lost_hosts import noted
from tests.faults.survivors import (
    EXACT,
    LEFT,
    MARKED,
    SIZE,
    WENT_ON,
    Case,
    last_step,
    play,
    straight,
)
from tests.long_cases import long
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
        *long(Case(partners=True, lost=(1, 3), in_turn=True)),
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


@pytest.mark.parametrize(
    ("rank", "step", "at"),
    [
        (2, 1, "boundary"),  # optimizers have made tensors: the ranks compare anew which they share
        (0, 6, "step"),  # the store dies with its rank, and no comparison comes to an end
        *long((2, 63, "boundary"), (0, 62, "step")),  # the comparison after many steps
    ],
)
def test_a_death_around_a_comparison_of_replicas_costs_one_step(four, tmp_path, rank, step, at):
    log, of_both = tmp_path / "log", {"TRAINCKPT_EVERY": "never", "TEST_OWN_BYTES": 1 << 22}
    four.start(
        range(SIZE),
        replicated_training.train,
        tmp_path / "run",
        step + 5,
        tmp_path / "marks",
        log=log,
        TRAINCKPT_SURVIVORS="8 s",
        TRAINCKPT_REDUNDANCY="partner",
        TEST_DIES=f"{rank},{step},{at}",
        **of_both,
    )
    assert all(code not in (0, None) for code in four.ends()), log.read_text()
    before = noted(tmp_path / "marks")
    done = last_step(before)
    four.start(
        range(SIZE),
        replicated_training.train,
        tmp_path / "run",
        done + 1,
        tmp_path / "again",
        log=log,
        **of_both,
    )
    assert four.ends() == [0] * SIZE, log.read_text()
    assert EXACT in log.read_text()
    for facts, again in zip(before.values(), noted(tmp_path / "again").values(), strict=True):
        assert done - 1 <= again["began"]["step"] <= done
        both = again.keys() & facts.keys() - {"began"}
        assert all(again[step]["state"] == facts[step]["state"] for step in both)


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
