"""A resume under DDP is to the bit, whichever way DDP is used; or it says that it is not."""

from __future__ import annotations

import pytest

from tests.lifecycle import ddp_kinds
from tests.ranks.processes import preload, run_ranks

preload("tests.lifecycle.ddp_kinds")

BITWISE, INEXACT = "bitwise", "same data, not bitwise"


def resumed(tmp_path, kind, size, *, at, until):
    """Whether a resume trains as a run that never stopped, and what it says of itself."""
    straight = run_ranks(ddp_kinds.train, size, str(tmp_path / "straight"), kind, until)
    run_ranks(ddp_kinds.train, size, str(tmp_path / "run"), kind, at + 1, at)
    rest = run_ranks(ddp_kinds.train, size, str(tmp_path / "run"), kind, until)
    assert [began for _, began, _ in rest] == [at] * size
    (how,) = {how for _, _, how in rest}
    same = all(
        seen == {number: whole[number] for number in range(at, until)}
        for (whole, *_), (seen, *_) in zip(straight, rest, strict=True)
    )
    return same, how


@pytest.mark.parametrize("size", [2, 3])
def test_a_static_graph_goes_on_adding_gradients_and_in_the_same_order(tmp_path, size):
    assert resumed(tmp_path, "Static", size, at=4, until=8) == (True, BITWISE)
