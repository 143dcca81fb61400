"""Hosts that are lost with all that lay in their memory, while saves stay in memory alone."""

from __future__ import annotations

import pytest

from tests.faults.farm import farm, why_not
from tests.faults.lost_hosts import SIZE, Case, play, straight
from tests.long_cases import long

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with farm(tmp_path_factory.mktemp("farm") / "own", SIZE) as made:
        yield made


@pytest.fixture(scope="module")
def expected(four, tmp_path_factory):
    """What the run that lost nothing was, step by step."""
    return straight(four, tmp_path_factory.mktemp("straight"))


@pytest.mark.parametrize(
    "case",
    [
        Case("partner", (0,), spoiled=(1,)),
        Case("xor:4", (2,)),
        *long(Case("rs:2+2", (1, 3))),
        Case("rs:2+2", (0, 1), replaced=False, sealed=True),
    ],
    ids=str,
)
def test_what_lost_hosts_had_is_had_from_the_others_and_the_run_goes_on(
    four, expected, tmp_path, case
):
    found = play(four, case, tmp_path, expected)
    assert 0 < found.kept <= found.began <= found.done <= found.began + 1
    assert "rescued " in found.log
    assert ("snapshots are encrypted to" in found.log) == case.sealed
    computed = "of its 4 files rebuilt from the others" in found.log
    assert computed == (case.redundancy != "partner")
    assert found.log.count("this resume is bitwise") == int(case.replaced)


def test_if_more_is_lost_than_may_be_the_newest_commit_stands_and_it_is_said(
    four, expected, tmp_path
):
    found = play(four, Case("xor:4", (1, 2), every="3 steps"), tmp_path, expected)
    assert 0 < found.began <= found.done
    assert found.began % 3 == 0
    if found.kept > found.began:  # else the newest that was kept was committed too
        assert "is no longer complete: the files of rank 1, 2 are lost" in found.log
