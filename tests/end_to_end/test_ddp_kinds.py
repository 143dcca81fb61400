"""A resume under DDP is to the bit, whichever way DDP is used; or it says that it is not."""

from __future__ import annotations

import pytest

from tests.end_to_end import ddp_kinds
from tests.ranks.processes import preload, run_in_turn

preload("tests.end_to_end.ddp_kinds")

BITWISE, INEXACT = "bitwise", "same data, not bitwise"


def resumed(tmp_path, kind, size, *, at, until):
    """Whether a resume trains as a run that never stopped, and what it says of itself."""
    straight, _, rest = run_in_turn(
        size,
        (ddp_kinds.train, str(tmp_path / "straight"), kind, until),
        (ddp_kinds.train, str(tmp_path / "run"), kind, at + 1, at),
        (ddp_kinds.train, str(tmp_path / "run"), kind, until),
    )
    assert [began for _, began, _ in rest] == [at] * size
    (how,) = {how for _, _, how in rest}
    same = all(
        seen == {number: whole[number] for number in range(at, until)}
        for (whole, *_), (seen, *_) in zip(straight, rest, strict=True)
    )
    return same, how


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_static_graph_goes_on_adding_gradients_and_in_the_same_order(tmp_path, size):
    assert resumed(tmp_path, "Static", size, at=4, until=8) == (True, BITWISE)


@pytest.mark.parametrize(
    "kind", [pytest.param("Inside", marks=pytest.mark.long), "InsideMade", "InsideResumed"]
)
def test_a_window_goes_on_where_the_module_in_the_ddp_is_tracked(tmp_path, kind):
    """Which parameters it used, and that the next forward broadcasts no buffers."""
    assert resumed(tmp_path, kind, 2, at=7, until=12) == (True, BITWISE)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("Ordered", marks=pytest.mark.long),
        "OrderedResumed",
        pytest.param("Part", marks=pytest.mark.long),
        "TwoParts",
    ],
)
def test_gradients_are_added_in_the_same_order_where_the_module_in_the_ddp_is_tracked(
    tmp_path, kind
):
    assert resumed(tmp_path, kind, 3, at=4, until=8) == (True, BITWISE)


def test_a_module_that_was_wrapped_again_is_exact_where_the_resumed_script_does_so_at_once(
    tmp_path,
):
    assert resumed(tmp_path, "AgainKnown", 3, at=5, until=9) == (True, BITWISE)


def test_a_module_that_is_wrapped_again_only_after_the_resume_is_said_not_to_be_exact(tmp_path):
    _, how = resumed(tmp_path, "Again", 3, at=5, until=9)
    assert how == INEXACT


def test_a_ddp_that_only_the_first_forward_makes_is_said_not_to_be_exact(tmp_path):
    _, how = resumed(tmp_path, "Replicated", 3, at=4, until=8)
    assert how == INEXACT


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("Power", marks=pytest.mark.long),
        "PowerResumed",
        "PostLocal",
        pytest.param("Halves", marks=pytest.mark.long),
    ],
)
def test_a_communication_hook_goes_on_with_what_it_kept(tmp_path, kind):
    assert resumed(tmp_path, kind, 2, at=6, until=10) == (True, BITWISE)


def test_a_communication_hook_whose_state_nobody_keeps_is_said_not_to_be_exact(tmp_path):
    _, how = resumed(tmp_path, "Counted", 2, at=4, until=6)
    assert how == INEXACT
