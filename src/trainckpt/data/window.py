"""Record the start of the optimizer window, from which a run resumes in another world.

A snapshot inside a window holds gradients of use only to the world that made them. Another world
drops them and trains the window's samples again, so the loader records its position at each
window's start. That happens at nearly every boundary: a `WindowStart` therefore holds only
references and integers. `written` turns it into a dict for a state. The pass around the window's
start may be over by then: a window can straddle the end of an epoch.

    in_pass, exhausted, passes_started, batches, samples    as in the loader's state
    position   index batches consumed of the assignment
    begun      the pass with this `order` has begun, at the window's start or since
    order      inputs that decide the order of that pass; see resharding.py
    share      how ranks share the order: number of ranks, batch size, dropped remainder
    base, pads, padded             the assignment in which `position` counts
    trained, padding_trained       totals over all ranks: all that another world needs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.data.resharding import ALTERNATIVE_HINT, Assignment, EpochResharder

if TYPE_CHECKING:
    from collections.abc import Callable


class WindowStart(NamedTuple):
    """A window's start. `deal` is the assignment of its pass or, between passes, of the next."""

    in_pass: bool
    exhausted: bool
    passes_started: int
    batches: int
    samples: int
    position: int
    deal: Assignment | None


def window_as_dict(
    window_start: WindowStart, resharder: EpochResharder, next_assignment: Callable[[], Assignment]
) -> dict[str, Any]:
    """Return a window's start as a dict of plain values.

    Args:
        mark: The newest window start.
        dealer: The loader's `EpochResharder`.
        next_deal: Called if no pass has begun since a window start between passes.
    """
    assignment = window_start.deal or next_assignment()
    position = window_start.position if window_start.in_pass else 0
    is_over = window_start.in_pass and position >= resharder.batches(assignment)
    return {
        "in_pass": window_start.in_pass,
        "exhausted": window_start.exhausted,
        "passes_started": window_start.passes_started,
        "batches": window_start.batches,
        "samples": window_start.samples,
        "position": position,
        "begun": window_start.deal is not None,
        "order": assignment.order,
        "knows_ranks": resharder.knows_ranks,
        "share": resharder.share(),
        "base": assignment.base,
        "pads": assignment.pads,
        "padded": assignment.padded,
        "trained": resharder.trained(assignment, position),
        "padding_trained": resharder.padding(assignment) if is_over else 0,
    }


def with_begun_pass(
    window_start: WindowStart | dict[str, Any], assignment: Assignment
) -> WindowStart | dict[str, Any]:
    """Return the window's start, with the order of the pass that has just begun if missing."""
    if isinstance(window_start, WindowStart):
        return (
            window_start
            if window_start.deal is not None
            else window_start._replace(deal=assignment)
        )
    return (
        window_start
        if window_start["begun"]
        else {**window_start, "begun": True, "order": assignment.order}
    )


def is_order_drawn(window: dict[str, Any]) -> bool:
    """Return True if the order came from random generators; a resume then draws it again."""
    return window["order"]["rng"] is not None


def differences(
    name: str,
    saved: dict[str, Any],
    resharder: EpochResharder | str,
    processes: tuple[int, int] | None,
) -> list[str]:
    """Return the reasons against resuming a saved state in another world, one sentence each."""
    if isinstance(resharder, str):
        return [f"{name}: {resharder}"]
    window = saved.get("window")
    if window is None:
        saved_kind = saved.get("facts", {}).get("sampler") or f"loader of kind {saved['kind']}"
        return [
            (
                f"{name}: the saved state does not say where its window began (its {saved_kind} "
                "could not be dealt over other ranks, or an older version saved it); "
                + ALTERNATIVE_HINT
            )
        ]
    reasons = []
    saved_kind, now = window["order"]["kind"], resharder.kind
    if saved_kind != now:
        reasons.append(
            f"{name}: the data was {saved_kind}, is {now}; keep the shuffling, and "
            + ALTERNATIVE_HINT
        )
    elif window["order"]["length"] != resharder.length:
        saved_length = window["order"]["length"]
        reasons.append(
            f"{name}: the data set had {saved_length} samples, has {resharder.length}; use the "
            "same one"
        )
    if processes is not None:
        reasons += _rank_unaware(name, window, resharder, *processes)
    return reasons


def _rank_unaware(
    name: str,
    window: dict[str, Any],
    resharder: EpochResharder,
    saved_count: int,
    current_count: int,
) -> list[str]:
    if resharder.draws and max(saved_count, current_count) > 1:
        return [
            f"{name}: in a run of several processes each has its own order, {resharder.kind}; "
            + ALTERNATIVE_HINT
        ]
    for is_unaware, count in (
        (not window["knows_ranks"], saved_count),
        (not resharder.knows_ranks, current_count),
    ):
        if is_unaware and count > 1 and saved_count != current_count:
            return [f"{name}: each of {count} processes reads all of the data; {ALTERNATIVE_HINT}"]
    return []
