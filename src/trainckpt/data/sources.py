"""The kinds of loader that can be tracked, and how a pass over each begins or goes on.

    map       a plain DataLoader over a map-style dataset: exact, by fast-forwarding indices
    iterable  a plain DataLoader over an IterableDataset: by the dataset's own state_dict
              (num_workers=0; see streams.py), else by loading again and dropping what was consumed
    stateful  anything with its own state_dict and load_state_dict: see stateful.py
    ahead     what an integration makes of a framework's loader, which fetches ahead: see ahead.py

The order when a pass goes on where it was saved, which `LoaderSource.resume` obeys:
main randomness as before the iterator was made; samplers and the data's own generators likewise;
the iterator; fast-forward; generators as they were when saved. The caller puts the main randomness
back afterwards.

Nothing of it is taken on trust. The index lists that are drawn again have to be those that were
consumed, and batches that are loaded again those that were returned. A stream goes on by its own
state of some batches before (`_EVERY`): that has to lead to the batches that came since, or the
pass is loaded again (a shuffle buffer is not in the state, say). Where that does not lead there
either, a warning says so.

A pass can also go on in another data-parallel world (`resume_elsewhere`): what is left of its order
is dealt anew (see dealing.py), to workers that start as for a new pass.

Used by: loader.py.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from trainckpt.data import carried, own_random, sampler
from trainckpt.data.carried import Changing, Watch
from trainckpt.data.dealing import Deal, Dealer, dealer_of
from trainckpt.data.iterators import (
    Plan,
    Progress,
    WorkersIterator,
    has_run_out,
    make_iterator,
    self_test,
)
from trainckpt.data.own_state import has_state, refuse_arguments
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.data.sampler import length
from trainckpt.data.shield import kill_workers
from trainckpt.data.stateful import StatefulSource
from trainckpt.data.streams import Stream
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainckpt.data.ahead import AheadSource
    from trainckpt.format.exactness import Report

_EVERY = 8  # batches after which a stream's state is noted, to be tried

Source: TypeAlias = "LoaderSource | StatefulSource | AheadSource"


def source_of(loader: Iterable[Any], name: str, report: Report) -> Source:
    """Return how this loader is tracked; ConfigurationError if it cannot be.

    `report` is told how a resume goes on, where that turns out to be less than exactly.
    """
    own = getattr(type(loader), "__trainckpt_source__", None)
    if own is not None:  # an integration knows better
        source: Source = own(loader, name, report)
        return source
    if has_state(loader) and not _is_torch_method(loader, "state_dict"):
        refuse_arguments(loader, name)
        return StatefulSource(loader, name, report)
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{name}: a {type(loader).__qualname__} is neither a torch DataLoader nor has "
            "state_dict and load_state_dict, so its position cannot be kept",
            hint=_hint(loader),
        )
    for method in ("__iter__", "_get_iterator"):
        if not _is_torch_method(loader, method):
            raise ConfigurationError(
                f"{name}: {type(loader).__qualname__} has its own {method}, which tracking would "
                "bypass",
                hint="track the DataLoader inside it, or give the class a state_dict",
            )
    self_test()
    for _, asked in sampler.samplers_of(loader):
        if has_state(asked):
            refuse_arguments(asked, name)
    return LoaderSource(loader, name, report)


def _hint(loader: Any) -> str:
    if type(loader).__name__ == "_FabricDataLoader":
        return (
            "give the Checkpointer the DataLoader itself, and move each batch by "
            "fabric.to_device(batch); with several ranks make it with a DistributedSampler"
        )
    return "call ckpt.boundary() in the loop and track an object that holds your position"


def _is_torch_method(loader: Any, method: str) -> bool:
    module = getattr(getattr(type(loader), method, None), "__module__", "")
    return str(module).startswith("torch.utils.data")


class Trial(NamedTuple):
    """A stream's own state some batches ago, and what it is tried with.

    Attributes:
        at: Batches that were consumed then.
        rngs: The main randomness before each fetch since.
    """

    at: int
    own: Any
    data: dict[str, bytes]
    carried: dict[str, Any]
    rngs: list[dict[str, Any]]

    def saved(self, since: bytes) -> dict[str, Any]:
        """Return it with what follows from the batches that it leads to."""
        return {**self._asdict(), "rngs": list(self.rngs), "since": since}

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> Trial:
        """Return what was saved."""
        return cls(**{name: saved[name] for name in cls._fields})._replace(rngs=[*saved["rngs"]])


class LoaderSource:
    """A plain DataLoader. The user's object is never changed: iterators are made over a copy.

    Attributes:
        kind: "map" or "iterable".
        progress: What was consumed of the running pass.
        dealer: Deals the loader's order over ranks, or the reason why nobody can.
        deal: What is dealt in the running or last pass; None before, or without a dealer.
    """

    def __init__(self, loader: DataLoader[Any], name: str, report: Report) -> None:
        self.kind = "iterable" if isinstance(loader.dataset, IterableDataset) else "map"
        self._changing = Changing(name)
        self.progress = self._progress()
        self._loader = loader
        self._name = name
        self._report = report
        self._persistent = bool(loader.persistent_workers and loader.num_workers > 0)
        self._live: WorkersIterator | None = None  # persistent workers, between passes too
        self._latest: weakref.ref[Any] = weakref.ref(self)
        self._carried = False  # loaded: workers existed, and this process has none yet
        self._before: dict[str, Any] | None = None
        self._rng_before: dict[str, Any] | None = None
        self._data_before: dict[str, bytes] = {}  # what the workers' own generators begin with
        self._carried_before: dict[str, Any] = {}
        self._sampler_before: dict[str, Any] | None = None  # what is seen of those not known
        self._sampler_changed: set[str] = set()
        self._trial: Trial | None = None  # of a stream's own state
        self._is_tried = False  # that state is being tried
        self._base_seed: int | None = None
        self._reused = False
        self._made = False  # an iterator, ever
        self._stream: Stream | None = None  # an IterableDataset by whose own state it goes on
        if self.kind == "iterable" and not loader.num_workers and has_state(loader.dataset):
            refuse_arguments(loader.dataset, name)
            self._stream = Stream(name, loader.dataset, report)
        self.dealer = dealer_of(loader)
        self.deal: Deal | None = None
        self._ids: list[int] | None = None  # in a pass that the loader's own sampler does not deal

    @property
    def the_dealer(self) -> Dealer:
        """The dealer, where it is known that there is one."""
        assert isinstance(self.dealer, Dealer)
        return self.dealer

    def start(self) -> Any:
        """Begin a pass at its first batch, drawing exactly what a plain DataLoader draws."""
        if self._stream is not None:
            self._stream.begin_pass()
        self._rng_before = main_rng()
        self._before = self._captured()
        self._data_before = self._data_generators()
        self._carried_before = carried.capture(self._data)
        self._sampler_before = self._sampler_values()
        self._reused = self._live is not None or self._carried
        self._ids, self.deal = None, self._first_deal()
        self.progress = self._progress(workers=self.progress.workers if self._reused else {})
        self._trial = None
        if self._live is not None:
            self._live.progress = self.progress
            self._live._index_sampler = self._loader._index_sampler  # not what was dealt elsewhere
            self._live._reset(self._loader)
            return self._live
        return self._make(skip=0)

    def resume(self, saved: dict[str, Any]) -> Any:
        """Go on with the saved pass; no data is loaded, unless it has to be replayed."""
        self._take_deal(saved)
        if self.deal is not None and not self.deal.plain:
            self._ids = self.the_dealer.ids(self.deal)
        again = self._replays()
        if again:
            self.progress = self._progress()  # the workers go through it all again
        self._data_before = saved.get("data before", {})
        self._carried_before = saved.get("carried before", {})
        self._rewind_all()
        if self.kind == "map":
            iterator = self._make(skip=saved["position"])
            self._compare_order(saved)
        elif saved.get("ran_out"):  # with its last batch: what is loaded now would begin a pass
            assert self._stream is not None
            self._stream.resume_between(saved["own"], exhausted=True)
            iterator = iter(())
        elif self._stream is not None and saved["own"] is not None:
            iterator = self._go_on_by_state(self._stream, saved)
        else:
            iterator = self._make(skip=0)
        if again:
            self._load_again(iterator, saved)
        self.progress.position, self.progress.samples = saved["position"], saved["samples"]
        self.progress.passed = saved.get("passed", b"")
        sampler.restore(self._loader, saved["now"])
        self._put_data_generators(saved.get("data now", {}))
        carried.restore(self._data, saved.get("carried now", {}))
        return iterator

    def resume_elsewhere(self, window: dict[str, Any]) -> Iterator[Any]:
        """Go on at a window's start with what this rank gets of the rest; workers start afresh."""
        self.deal, position = self.the_dealer.deal_again(window)
        self._ids = self.the_dealer.ids(self.deal)
        then = self._captured()
        self._rng_before, self._before, self._reused = main_rng(), then, False
        self.progress = self._progress(samples=window["samples"] if window["in_pass"] else 0)
        iterator: Iterator[Any] = self._make(skip=position)
        if self.the_dealer.draws:
            sampler.restore(self._loader, then)  # drawing a seed for workers shifts no later epoch
        self.progress.position = position
        return iterator

    def abandon(self) -> None:
        """A pass was left in its middle: learn the generators its workers end up with."""
        if self._live is not None:
            self._live.drain()
        self._end(exhausted=False)
        self.progress = self._progress(workers=self.progress.workers)

    def finish(self) -> None:
        """A pass has run out."""
        self._end(exhausted=True)

    def _end(self, *, exhausted: bool) -> None:
        if self._stream is not None:
            self._stream.end_pass(exhausted=exhausted)
        self._trial = None
        self._look_at_samplers()
        self._rng_before = self._before = None
        if not self._persistent:
            self.progress.workers = {}

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return this source's part of the loader's state; all values are never changed later."""
        has_workers = self._live is not None or self._carried
        state = {
            "position": self.progress.position,
            "rng_before": self._rng_before,
            "before": self._before,
            "now": self._captured(stateful=not in_pass),
            "data before": self._data_before if in_pass else {},
            "data now": self._data_generators(),
            "carried before": self._carried_before if in_pass else {},
            "carried now": carried.capture(self._data),
            "changing": sorted({*self._changing.paths, *self._sampler_changed}),
            "base_seed": self._base_seed if in_pass or has_workers else None,
            "reused": self._reused if in_pass else has_workers,
            "workers": dict(self.progress.workers),
            "order": self.progress.order,
            "passed": self.progress.passed,
            "trial": None if self._trial is None else self._trial.saved(self.progress.since),
            "last end": None if self._stream is None else self._stream.last_end,
            "own": None,
            "deal": None if self.deal is None or self.deal.plain else self.deal._asdict(),
        }
        if self._stream is not None and (self._made or self._stream.is_between):
            state["own"] = self._stream.state
            state["ran_out"] = in_pass and has_run_out(self._latest())
        return state

    def load(self, saved: dict[str, Any]) -> None:
        """Take a saved state; between passes the samplers are put back at once."""
        self.shutdown()
        self.progress = self._progress(
            saved["position"], saved["samples"], workers=saved["workers"]
        )
        self._base_seed = saved["base_seed"]
        self._carried = saved["reused"] and self._persistent
        self._take_deal(saved)
        if not saved["in_pass"]:
            sampler.restore(self._loader, saved["now"])
            self._put_data_generators(saved.get("data now", {}))
            carried.restore(self._data, saved.get("carried now", {}))
            if saved["own"] is not None and self._stream is not None:
                self._stream.resume_between(saved["own"], exhausted=saved["exhausted"])

    def put_back_last(self, saved: dict[str, Any]) -> None:
        """The pass after a state between passes begins: what was drawn since it was loaded is
        undone, as it is with the global generators."""
        carried.restore(self._data, saved.get("carried now", {}))
        self._put_data_generators(saved.get("data now", {}))

    def load_elsewhere(self, window: dict[str, Any]) -> None:
        """Take a window's start; what later epochs follow from is put back at once."""
        self.shutdown()
        deal, position = self.the_dealer.deal_again(window)
        self.deal = deal if window["in_pass"] else None
        self.progress = self._progress(position, window["samples"])
        self._base_seed, self._carried = None, False
        self.the_dealer.restore(window["order"])

    def next_deal(self) -> Deal:
        """Return what a pass that began now would deal."""
        return self.the_dealer.first_deal(self._captured(stateful=False), None, reused=False)

    def facts(self) -> dict[str, Any]:
        """Return what must be equal for a saved state to be exact here."""
        loader = self._loader
        batch_sampler = loader.batch_sampler
        index_sampler = loader.sampler if batch_sampler is None else batch_sampler
        return {
            "num_workers": loader.num_workers,
            "persistent_workers": self._persistent,
            "batch_size": loader.batch_size or getattr(batch_sampler, "batch_size", None),
            "drop_last": bool(loader.drop_last or getattr(batch_sampler, "drop_last", False)),
            "dataset length": length(loader.dataset),
            "sampler": type(index_sampler).__qualname__,
            "sampler length": length(index_sampler),
            "generators and seeds": sorted(sampler.parts(self._captured(stateful=False))),
        }

    def problems(self) -> list[str]:
        """Return what about this loader cannot be exact, one sentence each."""
        found = []
        if self._loader.num_workers > 0 and not getattr(self._loader, "in_order", True):
            found.append(
                f"{self._name}: in_order=False returns batches in the order they happen to be "
                "ready, which no resume can repeat"
            )
        return found

    def shutdown(self) -> None:
        """Kill the workers now."""
        for iterator in (self._live, self._latest()):
            if iterator is not None:
                kill_workers(iterator)
        self._live = None

    def _go_on_by_state(self, stream: Stream, saved: dict[str, Any]) -> Any:
        trial = saved.get("trial")
        if trial is None:  # one batch, after which nothing is known
            stream.resume_pass(saved["own"])
            iterator = self._make(skip=0)
        else:
            iterator = self._try(stream, trial, saved["position"])
        if iterator is not None:
            stream.last_end = saved.get("last end")
            self._trial = None if trial is None else Trial.loaded(trial)
            self.progress.since = b"" if trial is None else trial["since"]
            return iterator
        why = (
            f"{self._name}: the state of {type(stream.target).__qualname__} does not lead to the "
            "samples that came after it (a shuffle buffer is not in it, say): "
            f"{saved['batches']} batches are loaded again"
        )
        self._report(Restored(self._name, How.REPLAYED, why))
        stream.begin_again(saved["own"], saved["last end"])
        self._rewind_all()
        iterator = self._make(skip=0)
        self._load_again(iterator, saved)
        return iterator

    def _try(self, stream: Stream, trial: dict[str, Any], position: int) -> Any:
        """Return the iterator at a position, if the state from before leads there; else None."""
        self._is_tried = True
        try:
            stream.resume_pass(trial["own"])
            iterator = self._make(skip=0)
            self._put_data_generators(trial["data"])
            carried.restore(self._data, trial["carried"])
            for _, rng in zip(range(trial["at"], position), trial["rngs"], strict=True):
                set_main_rng(rng)
                next(iterator)
        except Exception:  # noqa: BLE001 - a dataset may raise anything
            iterator = None
        finally:
            self._is_tried = False
        if iterator is not None and self.progress.since == trial["since"]:
            return iterator
        self.progress = self._progress()
        return None

    def _note_fetch(self) -> None:
        assert self._stream is not None
        if self._is_tried:
            return
        if self.progress.position % _EVERY == 1:
            self.progress.since = b""
            self._trial = Trial(
                self.progress.position,
                copy.deepcopy(self._stream.state),
                self._data_generators(),
                carried.capture(self._data),
                [],
            )
        if self._trial is not None:
            self._trial.rngs.append(main_rng())

    def _load_again(self, iterator: Iterator[Any], saved: dict[str, Any]) -> None:
        """Drop what was consumed, and say so if it is not what was."""
        for number in range(saved["batches"]):
            try:
                next(iterator)
            except StopIteration:
                raise StateMismatch(
                    f"{self._name}: the saved position lies beyond the end of the data",
                    [f"{saved['batches']} batches were consumed, {number} came now"],
                    hint="resume with the dataset of the saved run",
                ) from None
        then, now = saved["workers"], self.progress.workers
        moved = [worker for worker in now if now[worker] != then.get(worker)]
        if saved.get("passed") != self.progress.passed or (moved and self._loader.num_workers):
            why = (
                f"{self._name}: the {saved['batches']} batches that were loaded again to get back "
                "to the saved position are not, or not with the same randomness, those that were "
                "trained on; data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.NOT_KEPT, why))

    def _compare_order(self, saved: dict[str, Any]) -> None:
        if saved.get("order", self.progress.order) == self.progress.order:
            return
        suspects = sampler.unproven(self._loader) or dict(sampler.samplers_of(self._loader))
        names = [type(one).__qualname__ for one in suspects.values()]
        why = (
            f"{self._name}: the order that {' and '.join(names)} begins with is not the one that "
            f"{saved['position']} batches were trained in: it depends on more than seed, epoch and "
            "generators; give the sampler state_dict and load_state_dict. Data differs from the "
            "uninterrupted run"
        )
        self._report(Restored(self._name, How.NOT_KEPT, why))

    def _sampler_values(self) -> dict[str, Any]:
        roots = sampler.unproven(self._loader)
        if self._replays():
            roots["dataset"] = self._loader.dataset
        return dict(carried.values(roots))

    def _look_at_samplers(self) -> None:
        before, self._sampler_before = self._sampler_before, None
        changed = set() if before is None else set(sampler.changed(before, self._sampler_values()))
        new = sorted(changed - self._sampler_changed)
        self._sampler_changed |= changed
        if new:
            warnings.warn(
                f"{self._name}: {', '.join(new)[:200]} changed over a pass, and is not kept: a "
                "resume in a later one may bring other data. Give it state_dict and "
                "load_state_dict; if no order depends on it, nothing is lost",
                stacklevel=5,
            )

    def _rewind_all(self) -> None:
        """Put back what the pass began with."""
        self._put_data_generators(self._data_before)
        carried.restore(self._data, self._carried_before)
        self._rewind()

    def _progress(self, position: int = 0, samples: int = 0, workers: Any = ()) -> Progress:
        return Progress(position, samples, dict(workers), self._changing)

    def _first_deal(self) -> Deal | None:
        if isinstance(self.dealer, str) or self._before is None:
            return None
        return self.dealer.first_deal(self._before, self._rng_before, reused=self._reused)

    def _take_deal(self, saved: dict[str, Any]) -> None:
        # between passes of a plain one nothing is known, nor wanted
        self._rng_before, self._before = saved["rng_before"], saved["before"]
        self._reused, self._ids = saved["reused"], None
        dealt = saved.get("deal")
        self.deal = Deal(**dealt) if dealt is not None else self._first_deal()

    def _make(self, skip: int) -> Any:
        plan = Plan(
            skip=skip,
            workers=self.progress.workers,
            base_seed=self._base_seed if skip or self._reused else None,
            rewind=self._rewind if self._reused else None,
            watch=None if self._replays() else Watch(self._data),
            compares=self.kind == "iterable",
            before_fetch=None if self._stream is None else self._note_fetch,
        )
        loader = copy.copy(self._loader)
        if self._ids is not None:
            self.the_dealer.put_ids(loader, self._ids)
        iterator = make_iterator(loader, self.progress, plan)
        self._made = True
        self._base_seed = iterator._base_seed
        self._carried = False
        self._latest = weakref.ref(iterator)
        self._live = iterator if self._persistent else None
        return iterator

    def _rewind(self) -> None:
        assert self._rng_before is not None
        assert self._before is not None
        set_main_rng(self._rng_before)
        sampler.restore(self._loader, self._before)

    def _captured(self, *, stateful: bool = True) -> dict[str, Any]:
        return sampler.capture(self._loader, stateful=stateful)

    def _data_generators(self) -> dict[str, bytes]:
        """Return those of the dataset, the collate_fn and samplers of unknown kinds, by path."""
        return own_random.capture({**self._data, **sampler.unproven(self._loader)})

    def _put_data_generators(self, saved: dict[str, bytes]) -> None:
        roots = {**self._data, **sampler.unproven(self._loader)}
        lost = own_random.restore(roots, saved, self._name)
        if lost:
            self._report(Restored(self._name, How.NOT_KEPT, lost))

    @property
    def _data(self) -> dict[str, Any]:
        """What may hold generators; a stream with state keeps its own."""
        found: dict[str, Any] = {"collate_fn": self._loader.collate_fn}
        if self.kind == "map" or self._replays():
            found = {"dataset": self._loader.dataset, **found}
        return found

    def _replays(self) -> bool:
        return self.kind == "iterable" and self._stream is None
