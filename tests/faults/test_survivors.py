"""Ranks that die or hang while nothing was saved: the others save, and the run goes on."""

from __future__ import annotations

import pytest

from tests.faults import replicated_training
from tests.faults.farm import farm, why_not
from tests.faults.lost_hosts import noted
from tests.faults.survivors import EXACT, LEFT, MARKED, SIZE, WENT_ON, Case, play, straight
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


@pytest.mark.parametrize("step", [1, *long(63)], ids=["first step", "comparison of replicas"])
def test_a_rank_that_dies_before_its_partner_has_its_newest_state_costs_one_step(
    four, tmp_path, step
):
    """Also where the ranks have just compared anew which tensors they share."""
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
        TEST_DIES=f"2,{step}",
        **of_both,
    )
    assert all(code not in (0, None) for code in four.ends()), log.read_text()
    four.start(
        range(SIZE),
        replicated_training.train,
        tmp_path / "run",
        step + 1,
        tmp_path / "again",
        log=log,
        **of_both,
    )
    assert four.ends() == [0] * SIZE, log.read_text()
    assert EXACT in log.read_text()
    before, after = noted(tmp_path / "marks"), noted(tmp_path / "again")
    for rank in range(SIZE):
        assert step - 1 <= after[rank]["began"]["step"] <= step
        again = after[rank].get(str(step), after[rank]["began"])
        assert again["state"] == before[rank][str(step)]["state"]


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
