"""Share the order of an epoch among the data ranks, and again after their number has changed.

An epoch has one order, independent of the world: torch's DistributedSampler for a single rank. W
ranks with batches of B take it in rounds of W x B entries. After whole rounds they have trained a
prefix of the order, however often the world changed on the way. One number tells the rest:

    order             4 1 7 0 3 6 2 5
    1 rank, B=2       one batch trained: the prefix 4 1
    now 4 ranks, B=1  rank 0 gets 7 2, rank 1 gets 0 5, rank 2 gets 3 4, rank 3 gets 6 1

The last round was short, so 4 and 1, from the beginning of the order, are trained twice. This is
padding, as in DistributedSampler. With the sampler's drop_last there is none.

Only the sampler's own `num_replicas` and `rank` count: tensor-parallel peers get the same data.
Everything is arithmetic, except `order`, which draws as the sampler does.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainckpt.data import sampler as samplers
from trainckpt.data.randomness import main_rng, set_main_rng

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader


SHUFFLED, IN_ORDER = "shuffled by DistributedSampler", "in order"
ALTERNATIVE_HINT = "use torch's DistributedSampler, also with one process"
_KNOWN_SAMPLERS = (
    DistributedSampler,
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Assignment(NamedTuple):
    """The part of an epoch's order that one pass covers.

    Attributes:
        base: Entries of the order trained before, in other worlds.
        pads: Ranks with too few ids get padding; otherwise the uneven remainder is dropped.
        padded: Padding trained before `base`; nothing is left then.
        order: Inputs from which `EpochResharder.order` makes the same order again.
        plain: The loader's own sampler shares the order: nothing was trained before.
    """

    base: int
    pads: bool
    padded: int
    order: dict[str, Any]
    plain: bool = False


def resharder_of(loader: DataLoader[Any]) -> EpochResharder | str:
    """Return the resharder of this loader's order, or the reason why there can be none."""
    if isinstance(loader.dataset, IterableDataset):
        kind = type(loader.dataset).__qualname__
        return (
            f"{kind} is an IterableDataset, whose data cannot be dealt over other ranks; use a "
            "map-style dataset with torch's DistributedSampler, also with one process"
        )
    index: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    batches = index if _iterates_as(index, BatchSampler) else None
    inner: Any = index if batches is None else batches.sampler
    if any(_iterates_as(inner, known) for known in _KNOWN_SAMPLERS):
        return EpochResharder(loader, inner, batches)
    return (
        f"the order of a {type(inner).__qualname__} is its own and cannot be dealt over other "
        f"ranks; {ALTERNATIVE_HINT}"
    )


def _iterates_as(sampler: Any, known: type[Any]) -> bool:
    # a subclass may override set_epoch or __len__, but not the order
    return isinstance(sampler, known) and type(sampler).__iter__ is known.__iter__


class EpochResharder:
    """Shares one loader's order among ranks. The user's loader and samplers are not changed.

    Attributes:
        kind: Description of the ordering; equal kinds give equal orders.
        knows_ranks: The sampler shares data among ranks; otherwise each process reads everything.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any, batches: Any) -> None:
        self._loader, self._sampler, self._batches = loader, sampler, batches
        self._name = next(n for n, s in samplers.samplers_of(loader) if s is sampler)
        self.knows_ranks = isinstance(sampler, DistributedSampler)
        if isinstance(sampler, SequentialSampler) or getattr(sampler, "shuffle", None) is False:
            self.kind = IN_ORDER
        else:
            self.kind = SHUFFLED if self.knows_ranks else f"drawn by {type(sampler).__qualname__}"

    @property
    def draws(self) -> bool:
        """True if the order comes from random generators: only one rank can know it."""
        return self.kind not in (SHUFFLED, IN_ORDER)

    @property
    def length(self) -> int:
        """Number of entries in the order of an epoch."""
        if self.draws:
            return len(self._sampler)
        whole = self._sampler.dataset if self.knows_ranks else self._sampler.data_source
        return len(whole)

    def share(self) -> dict[str, Any]:
        """Return how the ranks share the order.

        If this is equal in the saved run and here, an assignment resumes in its middle.
        """
        sampler, batches, knows_ranks = self._sampler, self._batches, self.knows_ranks
        return {
            "replicas": sampler.num_replicas if knows_ranks else 1,
            "sampler_drop_last": bool(sampler.drop_last) if knows_ranks else False,
            "batch_size": 1 if batches is None else batches.batch_size,
            "drop_last": False if batches is None else bool(batches.drop_last),
        }

    # ---- an assignment

    def first_assignment(
        self, before: dict[str, Any], rng: dict[str, Any] | None, *, reused: bool
    ) -> Assignment:
        """Return the assignment of a new pass, as the loader's own sampler makes it.

        Args:
            before: Result of `sampler.capture` at the beginning of the pass.
            rng: The main randomness at that time; None if the pass does not begin yet.
            reused: The pass begins with existing workers, so no seed is drawn for them.
        """
        prefix = f"{self._name}."
        order = {
            "kind": self.kind,
            "length": self.length,
            "integers": {
                key.removeprefix(prefix): value
                for key, value in before["integers"].items()
                if key.startswith(prefix) and not self.draws
            },
            "generators": before["generators"] if self.draws else {},
            "rng": rng if self.draws else None,
            "reused": reused and self.draws,
        }
        return Assignment(0, not self.share()["sampler_drop_last"], 0, order, plain=True)

    def reassign(self, window: dict[str, Any]) -> tuple[Assignment, int]:
        """Return the assignment that resumes at a window's start, and its consumed batches.

        With an equal share this is the old assignment in its middle: the same batches as before.
        """
        order, share = window["order"], self.share()
        if not window["in_pass"]:
            return Assignment(0, not share["sampler_drop_last"], 0, order), 0
        if window["share"] == share:
            continued = Assignment(window["base"], window["pads"], window["padded"], order)
            return continued, window["position"]
        pads = not (share["sampler_drop_last"] or share["drop_last"])
        return Assignment(window["trained"], pads, window["padding_trained"], order), 0

    def batches(self, assignment: Assignment) -> int:
        """Return the number of batches each rank gets."""
        ids = self._ids_per_rank(assignment, only_whole_batches=True)
        return -(-ids // int(self.share()["batch_size"]))

    def trained(self, assignment: Assignment, position: int) -> int:
        """Return the length of the trained prefix once each rank has trained `position` batches.

        Nothing is left of a finished assignment, even if it dropped a remainder.
        """
        if position >= self.batches(assignment):
            return self._length(assignment)
        share = self.share()
        return assignment.base + position * int(share["batch_size"]) * int(share["replicas"])

    def padding(self, assignment: Assignment) -> int:
        """Return the number of ids trained again in this pass, over all ranks."""
        ids_per_rank = self._ids_per_rank(assignment, only_whole_batches=True)
        ids = ids_per_rank * int(self.share()["replicas"])
        return assignment.padded + max(0, ids - (self._length(assignment) - assignment.base))

    def ids(self, assignment: Assignment) -> list[int]:
        """Return the ids of this rank, in order."""
        order, replicas = self.order(assignment), int(self.share()["replicas"])
        rank = self._sampler.rank if self.knows_ranks else 0
        total = self._ids_per_rank(assignment) * replicas
        rest = itertools.chain(order[assignment.base :], itertools.cycle(order))
        return list(itertools.islice(rest, rank, total, replicas))

    def order(self, assignment: Assignment) -> list[int]:
        """Return the order of the whole epoch.

        If the order is drawn, the loader's generators end up as at the end of that epoch. The main
        randomness stays as it is.
        """
        if self.draws:
            return self._draw_order(assignment.order)
        if not self.knows_ranks:
            return list(self._sampler)
        single_rank = copy.copy(self._sampler)
        single_rank.num_replicas, single_rank.rank, single_rank.drop_last = 1, 0, False
        single_rank.num_samples = single_rank.total_size = self.length
        for key, value in assignment.order["integers"].items():
            setattr(single_rank, key, value)
        return list(single_rank)

    def set_ids(self, loader: DataLoader[Any], ids: list[int]) -> None:
        """Make a private copy of the user's loader read these ids, in batches of its own size."""
        batched: Any = ids
        if self._batches is not None:
            batched = copy.copy(self._batches)
            batched.sampler = ids
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        loader.__dict__[attribute] = batched  # setattr is refused once a DataLoader is made

    def restore(self, order: dict[str, Any]) -> None:
        """Put the inputs of an order back into the user's loader: later epochs follow from them."""
        integers = {f"{self._name}.{key}": value for key, value in order["integers"].items()}
        saved = {"integers": integers, "generators": order["generators"], "samplers": {}}
        samplers.restore(self._loader, saved)

    def _ids_per_rank(self, assignment: Assignment, *, only_whole_batches: bool = False) -> int:
        # whole: count only ids in trained batches, without the loader's dropped remainder
        share, rest = self.share(), self._length(assignment) - assignment.base
        ids = -(-rest // share["replicas"]) if assignment.pads else rest // share["replicas"]
        dropped = ids % share["batch_size"] if only_whole_batches and share["drop_last"] else 0
        return int(ids - dropped)

    def _length(self, assignment: Assignment) -> int:
        return int(assignment.order["length"])

    def _draw_order(self, order: dict[str, Any]) -> list[int]:
        current_rng = main_rng()
        try:
            self.restore(order)
            set_main_rng(order["rng"] or {})
            if not order["reused"]:  # a new iterator draws a seed for its workers first
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            return list(self._sampler)
        finally:
            set_main_rng(current_rng)


# ---- the window's start, where another world resumes
#
# A snapshot inside a window holds gradients of use only to the world that made them. Another world
# drops them and trains the window's samples again, so the loader records its position at each
# window's start. That happens at nearly every boundary: a `WindowStart` therefore holds only
# references and integers. `window_as_dict` turns it into a dict for a state. The pass around the
# window's start may be over by then: a window can straddle the end of an epoch.
#
#     in_pass, exhausted, passes_started, batches, samples    as in the loader's state
#     position   index batches consumed of the assignment
#     begun      the pass with this `order` has begun, at the window's start or since
#     order      inputs that decide the order of that pass
#     share      how ranks share the order: number of ranks, batch size, dropped remainder
#     base, pads, padded             the assignment in which `position` counts
#     trained, padding_trained       totals over all ranks: all that another world needs


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
        next_assignment: Called if no pass has begun since a window start between passes.
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
        return window_start._replace(deal=window_start.deal or assignment)
    if window_start["begun"]:
        return window_start
    return {**window_start, "begun": True, "order": assignment.order}


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
        reason = (
            f"{name}: the saved state does not say where its window began (its {saved_kind} could "
            "not be dealt over other ranks, or an older version saved it); "
        )
        return [reason + ALTERNATIVE_HINT]
    reasons = []
    saved_order, kind, length = window["order"], resharder.kind, resharder.length
    if saved_order["kind"] != kind:
        reason = f"{name}: the data was {saved_order['kind']}, is {kind}; keep the shuffling, and "
        reasons.append(reason + ALTERNATIVE_HINT)
    elif saved_order["length"] != length:
        reasons.append(
            f"{name}: the data set had {saved_order['length']} samples, has {length}; use the same "
            "one"
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
        reason = f"{name}: in a run of several processes each has its own order, {resharder.kind}; "
        return [reason + ALTERNATIVE_HINT]
    counts = ((window["knows_ranks"], saved_count), (resharder.knows_ranks, current_count))
    for knows_ranks, count in counts:
        if not knows_ranks and count > 1 and saved_count != current_count:
            return [f"{name}: each of {count} processes reads all of the data; {ALTERNATIVE_HINT}"]
    return []
