"""Where the optimizer window began: the place to which another world goes back.

A snapshot taken inside a window holds gradients that only its own world can use. Another world
drops them and trains the window's samples again, so the loader notes at each window's start where
it is. That happens at nearly every boundary of a run: a `Mark` holds references and integers only.
It is written out, as a dict, when a state is asked for. The pass it lies in may be over by then:
a window can straddle the end of an epoch.

    in_pass, exhausted, passes_started, batches, samples    as in the loader's state
    position   index batches consumed of its deal
    begun      the pass that `order` belongs to has begun, at the mark or since
    order      what decides the order of that pass; see dealing.py
    share      how the order was shared: ranks, batch size, what is dropped
    base, pads, padded             the deal in which `position` counts
    trained, padding_trained       what all ranks together had trained: all that other worlds need

Used by: loader.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.data.dealing import INSTEAD, Deal, Dealer

if TYPE_CHECKING:
    from collections.abc import Callable


class Mark(NamedTuple):
    """A window's start. `deal` is that of the pass it lies in or, between passes, of the next."""

    in_pass: bool
    exhausted: bool
    passes_started: int
    batches: int
    samples: int
    position: int
    deal: Deal | None


def written(mark: Mark, dealer: Dealer, next_deal: Callable[[], Deal]) -> dict[str, Any]:
    """Return the mark as a dict of plain values.

    Args:
        mark: The newest one.
        dealer: That of its loader.
        next_deal: Called if no pass has begun since a mark between passes.
    """
    deal = mark.deal or next_deal()
    position = mark.position if mark.in_pass else 0
    over = mark.in_pass and position >= dealer.batches(deal)
    return {
        "in_pass": mark.in_pass,
        "exhausted": mark.exhausted,
        "passes_started": mark.passes_started,
        "batches": mark.batches,
        "samples": mark.samples,
        "position": position,
        "begun": mark.deal is not None,
        "order": deal.order,
        "knows_ranks": dealer.knows_ranks,
        "share": dealer.share(),
        "base": deal.base,
        "pads": deal.pads,
        "padded": deal.padded,
        "trained": dealer.trained(deal, position),
        "padding_trained": dealer.padding(deal) if over else 0,
    }


def begun_since(mark: Mark | dict[str, Any], deal: Deal) -> Mark | dict[str, Any]:
    """Return the mark once a pass has begun: the first one after a mark between passes is its."""
    if isinstance(mark, Mark):
        return mark if mark.deal is not None else mark._replace(deal=deal)
    return mark if mark["begun"] else {**mark, "begun": True, "order": deal.order}


def was_drawn(window: dict[str, Any]) -> bool:
    """Tell whether the order was drawn from generators: to go back there it is drawn again."""
    return window["order"]["rng"] is not None


def differences(
    name: str, saved: dict[str, Any], here: Dealer | str, processes: tuple[int, int] | None
) -> list[str]:
    """Return why a saved state cannot go on in another world, one sentence each."""
    if isinstance(here, str):
        return [f"{name}: {here}"]
    window = saved.get("window")
    if window is None:
        was = saved.get("facts", {}).get("sampler") or f"loader of kind {saved['kind']}"
        return [
            (
                f"{name}: the saved state does not say where its window began (its {was} could not "
                f"be dealt over other ranks, or an older version saved it); {INSTEAD}"
            )
        ]
    found = []
    was, now = window["order"]["kind"], here.kind
    if was != now:
        found.append(f"{name}: the data was {was}, is {now}; keep the shuffling, and {INSTEAD}")
    elif window["order"]["length"] != here.length:
        was = window["order"]["length"]
        found.append(f"{name}: the data set had {was} samples, has {here.length}; use the same one")
    if processes is not None:
        found += _blind(name, window, here, *processes)
    return found


def _blind(name: str, window: dict[str, Any], here: Dealer, then: int, now: int) -> list[str]:
    if here.draws and max(then, now) > 1:
        return [
            f"{name}: in a run of several processes each has its own order, {here.kind}; {INSTEAD}"
        ]
    for blind, count in ((not window["knows_ranks"], then), (not here.knows_ranks, now)):
        if blind and count > 1 and then != now:
            return [f"{name}: each of {count} processes reads all of the data; {INSTEAD}"]
    return []
