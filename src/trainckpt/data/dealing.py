"""How the order of an epoch is dealt over the data ranks, and dealt anew over another number.

An epoch has one order, whoever trains it: what torch's DistributedSampler gives to a single rank.
W ranks with batches of B take it in rounds of W x B entries, so what they have trained after whole
rounds is a prefix of it, however often the world changed on the way. One number says what is left:

    order             4 1 7 0 3 6 2 5
    1 rank, B=2       one batch trained: the prefix 4 1
    now 4 ranks, B=1  rank 0 gets 7 2, rank 1 gets 0 5, rank 2 gets 3 4, rank 3 gets 6 1

The last round was short, so 4 and 1, from the beginning of the order, are trained twice: padding,
as DistributedSampler takes it. Who drops the last gets none, but at most once everything.

Only the sampler's own `num_replicas` and `rank` count: tensor-parallel peers get the same data.
Everything here is arithmetic, but for `order`, which draws what the sampler draws.

Used by: sources.py, window.py.
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
    from torch.utils.data import DataLoader

SHUFFLED, IN_ORDER = "shuffled by DistributedSampler", "in order"
INSTEAD = "use torch's DistributedSampler, also with one process"
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Deal(NamedTuple):
    """What of an epoch's order is dealt in a pass.

    Attributes:
        base: Entries of the order that were trained before, in other worlds.
        pads: Ranks with too few ids are filled up; else what cannot be shared equally is dropped.
        padded: Padding trained before `base`; then nothing is left.
        order: What `Dealer.order` needs to find the same order again.
        plain: The loader's own sampler deals it: nothing was trained before.
    """

    base: int
    pads: bool
    padded: int
    order: dict[str, Any]
    plain: bool = False


def dealer_of(loader: DataLoader[Any]) -> Dealer | str:
    """Return who deals this loader's order, or why that cannot be done elsewhere."""
    if isinstance(loader.dataset, IterableDataset):
        kind = type(loader.dataset).__qualname__
        return (
            f"{kind} is an IterableDataset, whose data nobody can deal over other ranks; use a "
            "map-style dataset with torch's DistributedSampler, also with one process"
        )
    index: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    batches = index if _iterates_as(index, BatchSampler) else None
    inner: Any = index if batches is None else batches.sampler
    if any(_iterates_as(inner, known) for known in (DistributedSampler, SequentialSampler)):
        return Dealer(loader, inner, batches)
    if any(_iterates_as(inner, known) for known in _DRAWING):
        return Dealer(loader, inner, batches)
    return (
        f"the order of a {type(inner).__qualname__} is its own, nobody else can deal it over other "
        f"ranks; {INSTEAD}"
    )


def _iterates_as(sampler: Any, known: type[Any]) -> bool:
    # a subclass may have its own set_epoch or __len__, but the order must be torch's
    return isinstance(sampler, known) and type(sampler).__iter__ is known.__iter__


class Dealer:
    """Deals one loader's order. The user's loader and samplers are not changed.

    Attributes:
        kind: What orders the data; equal kinds give equal orders.
        knows_ranks: The sampler deals over ranks; else each process reads everything.
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
        """The order is drawn from random generators: one rank alone can know it."""
        return self.kind not in (SHUFFLED, IN_ORDER)

    @property
    def length(self) -> int:
        """Entries in the order of an epoch."""
        if self.draws:
            return len(self._sampler)
        whole = self._sampler.dataset if self.knows_ranks else self._sampler.data_source
        return len(whole)

    def share(self) -> dict[str, Any]:
        """Return how the order is shared; where it is equal, a deal goes on in its middle."""
        sampler, batches, aware = self._sampler, self._batches, self.knows_ranks
        return {
            "replicas": sampler.num_replicas if aware else 1,
            "sampler_drop_last": bool(sampler.drop_last) if aware else False,
            "batch_size": 1 if batches is None else batches.batch_size,
            "drop_last": False if batches is None else bool(batches.drop_last),
        }

    # ---- a deal

    def first_deal(
        self, before: dict[str, Any], rng: dict[str, Any] | None, *, reused: bool
    ) -> Deal:
        """Return the deal of a new pass, which the loader's own sampler makes.

        Args:
            before: What `sampler.capture` returned when the pass began.
            rng: The main randomness then; None if it does not begin yet.
            reused: The pass begins with workers that exist, so no seed is drawn for them.
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
        return Deal(0, not self.share()["sampler_drop_last"], 0, order, plain=True)

    def deal_again(self, window: dict[str, Any]) -> tuple[Deal, int]:
        """Return the deal that goes on at a window's start, and how many of its batches are over.

        In an equal share that is the old deal in its middle: the same batches as before.
        """
        order, share = window["order"], self.share()
        if not window["in_pass"]:
            return Deal(0, not share["sampler_drop_last"], 0, order), 0
        if window["share"] == share:
            return Deal(window["base"], window["pads"], window["padded"], order), window["position"]
        drops = share["sampler_drop_last"] or share["drop_last"]
        return Deal(window["trained"], not drops, window["padding_trained"], order), 0

    def batches(self, deal: Deal) -> int:
        """Return how many batches each rank gets."""
        return -(-self._ids_per_rank(deal, whole=True) // int(self.share()["batch_size"]))

    def trained(self, deal: Deal, position: int) -> int:
        """Return the prefix of the order that is trained once each rank trained its batches.

        A deal that is over leaves nothing, also if it dropped the last.
        """
        if position >= self.batches(deal):
            return self._length(deal)
        share = self.share()
        return deal.base + position * int(share["batch_size"]) * int(share["replicas"])

    def padding(self, deal: Deal) -> int:
        """Return how many ids are trained again in this pass, on all ranks together."""
        ids = self._ids_per_rank(deal, whole=True) * int(self.share()["replicas"])
        return deal.padded + max(0, ids - (self._length(deal) - deal.base))

    def padding_ids(self, deal: Deal) -> list[int]:
        """Return those ids; this finds the whole order."""
        count = self.padding(deal)
        return list(itertools.islice(itertools.cycle(self.order(deal)), count)) if count else []

    def ids(self, deal: Deal) -> list[int]:
        """Return what this rank gets, in order."""
        order, replicas = self.order(deal), int(self.share()["replicas"])
        rank = self._sampler.rank if self.knows_ranks else 0
        total = self._ids_per_rank(deal) * replicas
        rest = itertools.chain(order[deal.base :], itertools.cycle(order))
        return list(itertools.islice(rest, rank, total, replicas))

    def order(self, deal: Deal) -> list[int]:
        """Return the order of the whole epoch.

        Where it is drawn, the loader's generators are left as that epoch's end left them; the main
        randomness stays as it is.
        """
        if self.draws:
            return self._drawn(deal.order)
        if not self.knows_ranks:
            return list(self._sampler)
        alone = copy.copy(self._sampler)
        alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
        alone.num_samples = alone.total_size = self.length
        for key, value in deal.order["integers"].items():
            setattr(alone, key, value)
        return list(alone)

    def put_ids(self, loader: DataLoader[Any], ids: list[int]) -> None:
        """Make a private copy of the user's loader read these ids, batched as it batches."""
        batched: Any = ids
        if self._batches is not None:
            batched = copy.copy(self._batches)
            batched.sampler = ids
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        loader.__dict__[which] = batched  # setattr is refused once a DataLoader is made

    def restore(self, order: dict[str, Any]) -> None:
        """Put back into the user's loader what decided an order: later epochs follow from it."""
        named = {f"{self._name}.{key}": value for key, value in order["integers"].items()}
        self._put(named, order["generators"])

    def _ids_per_rank(self, deal: Deal, *, whole: bool = False) -> int:
        # whole: those in batches that are trained, which leaves out what the loader drops
        share, rest = self.share(), self._length(deal) - deal.base
        ids = -(-rest // share["replicas"]) if deal.pads else rest // share["replicas"]
        dropped = ids % share["batch_size"] if whole and share["drop_last"] else 0
        return int(ids - dropped)

    def _length(self, deal: Deal) -> int:
        return int(deal.order["length"])

    def _drawn(self, order: dict[str, Any]) -> list[int]:
        here = main_rng()
        try:
            self.restore(order)
            set_main_rng(order["rng"] or {})
            if not order["reused"]:  # a new iterator draws a seed for its workers first
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            return list(self._sampler)
        finally:
            set_main_rng(here)

    def _put(self, integers: dict[str, int], generators: dict[str, Any]) -> None:
        saved = {"integers": integers, "generators": generators, "samplers": {}}
        samplers.restore(self._loader, saved)
