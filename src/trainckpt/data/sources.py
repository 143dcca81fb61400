"""Begin and resume a pass over each kind of trackable loader.

    map       a plain DataLoader over a map-style dataset: exact, by fast-forwarding indices
    iterable  a plain DataLoader over an IterableDataset: by the dataset's own state_dict
              (num_workers=0; see iterable.py), else by loading the consumed batches again
    stateful  any object with its own state_dict and load_state_dict: see stateful_loader.py
    ahead     an integration's wrapper of a framework's loader with a reader: see prefetching.py

Each source has these methods; only the training thread calls them:

    start()              begin a pass, drawing exactly as the loader itself does
    resume(saved)        resume the saved pass in its middle; the caller then restores the main
                         randomness
    abandon(), finish()  end a pass that was left in its middle, or has run out
    state(in_pass)       this source's part of the loader's state, never changed later
    load(saved)          load such a state; between passes, restore generators at once
    undo_draws(saved)    undo draws since the load, as the first pass after it begins
    facts()              values that must be equal for a saved state to be exact here
    problems()           parts of the loader that cannot be exact, one sentence each
    shutdown()           kill the workers now

`LoaderSource.resume` restores in this order: the main randomness from before the iterator was made;
samplers and the data's own generators likewise; the iterator; fast-forward; the generators as they
were when saved.

Everything is checked. Index lists drawn again must equal the consumed ones, and batches loaded
again the returned ones. Each part has an object of its own:

    SamplerChecks       samplers whose order depends on more than is kept
    StreamTrials        a stream that resumes by its own state
    ComparedContent     lists, arrays, tensors and caches of the dataset
    RestoredNumbers     numbers that the loop has set, and those that the workers know

A pass can also resume in another data-parallel world (`resume_in_other_world`): the rest of its
order is shared anew (see resharding.py), among workers that start as for a new pass.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from trainckpt.data import carried_state, known_streams, randomness, sampler
from trainckpt.data.carried_state import Changing, DataState, Watch
from trainckpt.data.compared_content import ComparedContent
from trainckpt.data.iterable import StatefulStream
from trainckpt.data.iterators import (
    Plan,
    Progress,
    WorkersIterator,
    has_run_out,
    make_iterator,
    self_test,
)
from trainckpt.data.known_streams import refuse_lost_buffers, refuse_unrepeatable
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.data.resharding import Assignment, EpochResharder, resharder_of
from trainckpt.data.restored_numbers import RestoredNumbers
from trainckpt.data.sampler import length
from trainckpt.data.sampler_checks import SamplerChecks
from trainckpt.data.state_dict_methods import has_state, is_of, refuse_arguments
from trainckpt.data.stateful_loader import StatefulSource
from trainckpt.data.stream_trials import StreamTrials
from trainckpt.data.worker import kill_workers
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.data.prefetching import PrefetchingSource
    from trainckpt.format.exactness import Report

Source: TypeAlias = "LoaderSource | StatefulSource | PrefetchingSource"


def source_of(
    loader: Iterable[Any],
    name: str,
    report: Report,
    tracked_places: Callable[[], Iterable[tuple[int, str]]] = tuple,
) -> Source:
    """Return the source for this loader, by its kind.

    Args:
        report: Called with each part that turns out to be restored less than exactly.
        tracked_places: Returns the id of each object with tracked attributes, and their names.

    Raises:
        ConfigurationError: The loader cannot be tracked.
    """
    source_type: Any = getattr(type(loader), "__trainckpt_source__", None)
    if source_type is not None:  # an integration's own source
        return source_type(loader, name, report)  # type: ignore[no-any-return]
    if has_state(loader) and not _is_torch_method(loader, "state_dict"):
        refuse_arguments(loader, name)
        refuse_lost_buffers(loader, name)
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
    for _, inner_sampler in sampler.samplers_of(loader):
        if has_state(inner_sampler):
            refuse_arguments(inner_sampler, name)
    return LoaderSource(loader, name, report, tracked_places)


def _hint(loader: Any) -> str:
    if type(loader).__name__ == "WebLoader":
        return (
            "track torch.utils.data.DataLoader(dataset, ...) in place of the WebLoader, with its "
            "shuffling and batching among the stages of the dataset"
        )
    if type(loader).__name__ == "_FabricDataLoader":
        return (
            "give the Checkpointer the DataLoader itself, and move each batch by "
            "fabric.to_device(batch); with several ranks make it with a DistributedSampler"
        )
    return "call ckpt.boundary() in the loop and track an object that holds your position"


def _is_torch_method(loader: Any, method: str) -> bool:
    module = getattr(getattr(type(loader), method, None), "__module__", "")
    return str(module).startswith("torch.utils.data")


class LoaderSource:
    """A plain DataLoader. The user's object is never changed: iterators are made over a copy.

    Attributes:
        kind: "map" or "iterable".
        progress: Consumed part of the running pass.
        resharder: `EpochResharder` of the loader's order, or the reason why there is none.
        assignment: Of the running or last pass; None before, or without a resharder.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        report: Report,
        tracked_places: Callable[[], Iterable[tuple[int, str]]] = tuple,
    ) -> None:
        self.kind = "iterable" if isinstance(loader.dataset, IterableDataset) else "map"
        self._changing = Changing(name)
        self.progress = self._progress()
        self._loader = loader
        self._name = name
        self._report = report
        self._persistent = bool(loader.persistent_workers and loader.num_workers > 0)
        # persistent workers, between passes too
        self._persistent_iterator: WorkersIterator | None = None
        self._last_iterator: weakref.ref[Any] = weakref.ref(self)
        self._had_workers = False  # the saved run had workers, and this process has none yet
        self._order_inputs_before: dict[str, Any] | None = None
        self._rng_before: dict[str, Any] | None = None
        self._data_before = DataState()
        self._pass_numbers: dict[str, float] = {}  # of a stream without a state, before the pass
        self._workers_before: dict[int, dict[str, Any]] = {}  # states they entered the pass with
        self._numbers = RestoredNumbers(loader)
        self._content = ComparedContent(loader, name, report)
        self._base_seed: int | None = None
        self._reuses_workers = False
        self._has_iterated = False  # an iterator, ever
        # an IterableDataset that resumes by its own state
        self._stream: StatefulStream | None = None
        self._trials: StreamTrials | None = None
        if self.kind == "iterable":
            refuse_unrepeatable(loader.dataset, name)
        has_own_state = self.kind == "iterable" and has_state(loader.dataset)
        # in workers too, streaming's own loader is needed (see known_streams.py)
        if has_own_state and (not loader.num_workers or is_of(loader.dataset, "streaming")):
            refuse_arguments(loader.dataset, name)
        if has_own_state and not loader.num_workers:
            generators = (self._randomness, self._restore_randomness)
            self._stream = StatefulStream(name, loader.dataset, report, generators=generators)
            self._trials = StreamTrials(self._stream, self, name, report)
        # a stream without a state: its consumed batches are loaded again
        self._replays = self.kind == "iterable" and self._stream is None
        self._samplers = SamplerChecks(
            loader, name, report, tracked_places=tracked_places, with_dataset=self._replays
        )
        self.resharder = resharder_of(loader)
        self.assignment: Assignment | None = None
        self._ids: list[int] | None = None  # this rank's ids, in a resharded pass

    @property
    def order(self) -> bytes:
        """Digest of the index lists consumed in the running pass; empty for a stream."""
        return self.progress.order

    @property
    def required_resharder(self) -> EpochResharder:
        """The resharder; requires that there is one."""
        assert isinstance(self.resharder, EpochResharder)
        return self.resharder

    def start(self) -> Any:
        """Begin a pass."""
        if self._stream is not None:
            self._stream.begin_pass()
        self._rng_before = main_rng()
        self._order_inputs_before = sampler.capture(self._loader)
        self._data_before, self._pass_numbers = self.capture_data(), self._pass_numbers_now()
        self._samplers.begin_pass()
        self._reuses_workers = self._persistent_iterator is not None or self._had_workers
        self._ids, self.assignment = None, self._first_assignment()
        self._workers_before = dict(self.progress.workers) if self._reuses_workers else {}
        self.progress = self._progress(workers=self._workers_before)
        if self._trials is not None:
            self._trials.clear()
        if self._persistent_iterator is not None:
            self._persistent_iterator.progress = self.progress
            # not a resharded pass's
            self._persistent_iterator._index_sampler = self._loader._index_sampler
            self._persistent_iterator._reset(self._loader)
            return self._persistent_iterator
        return self.open_iterator(skip=0)

    def resume(self, saved: dict[str, Any]) -> Any:
        """Resume the saved pass in its middle."""
        self._restore_assignment(saved)
        if self.assignment is not None and not self.assignment.plain:
            self._ids = self.required_resharder.ids(self.assignment)
        if self._replays:  # the workers load everything again
            self._workers_before = saved.get("workers before", {})
            self.progress = self._progress(workers=self._workers_before)
        self._data_before = DataState.saved_as(saved, "before")
        self._pass_numbers = saved.get("pass numbers", {})
        known_streams.restore_pass_numbers(self._loader.dataset, self._pass_numbers)
        self.rewind_all()
        if self.kind == "map":
            iterator = self._fast_forward(saved)
        elif saved.get("ran_out"):  # with its last batch: a load now would begin a new pass
            assert self._stream is not None
            self._stream.resume_between(saved["own"], exhausted=True)
            iterator = iter(())
        elif self._trials is not None and saved["own"] is not None:
            iterator = self._trials.resume(saved)
        else:
            iterator = self.open_iterator(skip=0)
        if self._replays:
            self.replay(iterator, saved)
        self.progress.position, self.progress.samples = saved["position"], saved["samples"]
        self.progress.batches_digest = saved.get("passed", b"")
        sampler.restore(self._loader, saved["now"])
        self.restore_data(DataState.saved_as(saved, "now"))
        if self.kind == "iterable":
            self._content.compare(saved)
        return iterator

    def resume_in_other_world(self, window: dict[str, Any]) -> Iterator[Any]:
        """Resume at a window's start with this rank's share of the rest; workers start afresh."""
        self.assignment, position = self.required_resharder.reassign(window)
        self._ids = self.required_resharder.ids(self.assignment)
        order_inputs = sampler.capture(self._loader)
        self._rng_before, self._order_inputs_before = main_rng(), order_inputs
        self._reuses_workers = False
        self.progress = self._progress(samples=window["samples"] if window["in_pass"] else 0)
        iterator: Iterator[Any] = self.open_iterator(skip=position)
        if self.required_resharder.draws:  # drawing a seed for workers shifts no later epoch
            sampler.restore(self._loader, order_inputs)
        self.progress.position = position
        return iterator

    def abandon(self) -> None:
        """End a pass left in its middle."""
        if self._persistent_iterator is not None:  # records the generators its workers end up with
            self._persistent_iterator.drain()
        self._end(exhausted=False)
        self.progress = self._progress(workers=self.progress.workers)

    def finish(self) -> None:
        """End a pass that has run out."""
        self._end(exhausted=True)

    def _end(self, *, exhausted: bool) -> None:
        self._content.compare_cached()
        if self._stream is not None and self._trials is not None:
            self._stream.end_pass(exhausted=exhausted)
            self._trials.clear()
        workers = self._persistent_iterator
        self._samplers.end_pass(() if workers is None else chain(*workers.left.values()))
        self._rng_before = self._order_inputs_before = None
        if not self._persistent:
            self.progress.workers = {}

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return this source's part of the loader's state."""
        has_workers = self._persistent_iterator is not None or self._had_workers
        data_before = self._data_before if in_pass else DataState()
        data_now = self.capture_data()
        state = {
            "position": self.progress.position,
            "rng_before": self._rng_before,
            "before": self._order_inputs_before,
            "inputs": sampler.inputs(self._loader),
            "now": sampler.capture(self._loader, stateful=not in_pass),
            "sampler states": self._samplers.states() if in_pass else {},
            "data before": data_before.generators,
            "data now": data_now.generators,
            "pass numbers": self._pass_numbers if in_pass else self._pass_numbers_now(),
            "carried before": data_before.carried,
            "carried now": data_now.carried,
            "changing": sorted({*self._changing.paths, *self._samplers.changed}),
            "base_seed": self._base_seed if in_pass or has_workers else None,
            "reused": self._reuses_workers if in_pass else has_workers,
            "workers": dict(self.progress.workers),
            "workers before": self._workers_before if in_pass and self._replays else {},
            "order": self.progress.order,
            "ahead": self._order_ahead() if in_pass else None,
            "passed": self.progress.batches_digest,
            **self._content.state(),
            **self._numbers.state(has_workers=in_pass or has_workers),
            "trial": None if self._trials is None else self._trials.newest(),
            "last end": None if self._stream is None else self._stream.last_end,
            "own": None,
            "deal": None
            if self.assignment is None or self.assignment.plain
            else self.assignment._asdict(),
        }
        if self._stream is not None and (self._has_iterated or self._stream.is_between):
            state["own"] = self._stream.state
            state["ran_out"] = in_pass and has_run_out(self._last_iterator())
        return state

    def load(self, saved: dict[str, Any]) -> None:
        """Load a saved state."""
        self.shutdown()
        self.progress = self._progress(saved["position"], saved["samples"], saved["workers"])
        self._base_seed = saved["base_seed"]
        self._had_workers = saved["reused"] and self._persistent
        self._numbers.load(saved)
        self._content.load(saved)
        self._restore_assignment(saved)
        if not saved["in_pass"]:  # what the script does at the head of an epoch is yet to come
            self._numbers.restore_of_loop()
            sampler.restore(self._loader, saved["now"])
            self.restore_data(DataState.saved_as(saved, "now"))
            numbers = saved.get("pass numbers", {})
            known_streams.restore_pass_numbers(self._loader.dataset, numbers)
            if saved["own"] is not None and self._stream is not None:
                self._stream.resume_between(saved["own"], exhausted=saved["exhausted"])

    def undo_draws(self, saved: dict[str, Any]) -> None:
        """Undo draws since the load."""
        self.restore_data(DataState.saved_as(saved, "now"))
        self._compare_inputs(saved)

    def load_in_other_world(self, window: dict[str, Any]) -> None:
        """Load a window's start; restore the inputs of later epochs at once."""
        self.shutdown()
        assignment, position = self.required_resharder.reassign(window)
        self.assignment = assignment if window["in_pass"] else None
        self.progress = self._progress(position, window["samples"])
        self._base_seed, self._had_workers = None, False
        self.required_resharder.restore(window["order"])

    def next_assignment(self) -> Assignment:
        """Return the assignment of a pass beginning now."""
        return self.required_resharder.first_assignment(
            sampler.capture(self._loader, stateful=False), None, reused=False
        )

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal for an exact resume."""
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
            "index sampler": type(loader.sampler).__qualname__,
            "sampler length": length(index_sampler),
            "generators and seeds": sorted(
                sampler.part_names(sampler.capture(self._loader, stateful=False))
            ),
        }

    def problems(self) -> list[str]:
        """Return the parts of the loader that cannot be exact."""
        if self._loader.num_workers == 0 or getattr(self._loader, "in_order", True):
            return []
        sentence = (
            f"{self._name}: in_order=False returns batches in the order they happen to be ready, "
            "which no resume can repeat"
        )
        return [sentence]

    def shutdown(self) -> None:
        """Kill the workers now."""
        for iterator in (self._persistent_iterator, self._last_iterator()):
            if iterator is not None:
                kill_workers(iterator)
        self._persistent_iterator = None

    def replay(self, iterator: Iterator[Any], saved: dict[str, Any]) -> None:
        """Load and drop the consumed batches; report a difference from them."""
        for number in range(saved["batches"]):
            try:
                next(iterator)
            except StopIteration:
                raise StateMismatch(
                    f"{self._name}: the saved position lies beyond the end of the data",
                    [f"{saved['batches']} batches were consumed, {number} came now"],
                    hint="resume with the dataset of the saved run",
                ) from None
        saved_workers, current_workers = saved["workers"], self.progress.workers
        moved = [  # older releases saved fewer states of each
            worker
            for worker, states in current_workers.items()
            if worker not in saved_workers
            or any(states.get(name) != state for name, state in saved_workers[worker].items())
        ]
        if saved.get("passed") != self.progress.batches_digest or (
            moved and self._loader.num_workers
        ):
            reason = (
                f"{self._name}: the {saved['batches']} batches that were loaded again to get back "
                "to the saved position are not, or not with the same randomness, those that were "
                "trained on; data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.NOT_KEPT, reason))

    def _compare_inputs(self, saved: dict[str, Any]) -> None:
        """Report attributes of the samplers, and data, that are not what they were at the save."""
        self._samplers.compare_inputs(saved.get("inputs", {}))
        self._content.compare(saved)

    def _fast_forward(self, saved: dict[str, Any]) -> Any:
        """Return the iterator after the consumed indices, which are drawn again and compared.

        A sampler may have a state that the loop changes in mid-pass, such as priorities. It is
        loaded then, and decides what follows. If others are drawn, by a sampler that draws alike
        each time, and no worker loads the samples, they are loaded again as well: a sample may
        draw from the sampler's generator.
        """
        is_complete = saved["position"] == (saved.get("passes") or {}).get("announced")
        values = self._samplers.values()
        iterator, is_same = self._draw_order(saved)
        draws_alike = not self._loader.num_workers and values == self._samplers.values()
        if iterator is not None and self._samplers.load_states(saved.get("sampler states", {})):
            if not is_same and not sampler.is_stateless(iterator._sampler_iter):
                self._samplers.report_order(saved["position"], is_shorter=False)
            self.progress.order = saved["order"]
            self._compare_inputs(saved)
            return iterator
        if not is_same and not is_complete and draws_alike:
            iterator, is_same = self._draw_order_anew(saved, loads_samples=True)
            if is_same:
                reason = (
                    f"{self._name}: {saved['position']} batches are loaded again, since reading a "
                    "sample draws from the generator of the sampler"
                )
                self._report(Restored(self._name, How.REPLAYED, reason))
            else:
                iterator, _ = self._draw_order_anew(saved, loads_samples=False)
        if not is_same and not is_complete:
            self._samplers.report_order(saved["position"], is_shorter=iterator is None)
            return iter(()) if iterator is None else iterator
        self._compare_inputs(saved)
        if is_same:
            self._compare_ahead(saved.get("ahead"))
            return iterator
        self.progress.order = saved["order"]  # nothing is left of it
        return iter(())

    def _draw_order(
        self, saved: dict[str, Any], *, loads_samples: bool = False
    ) -> tuple[Any, bool]:
        """Return the iterator after the consumed indices, or None, and if they are the saved."""
        try:
            iterator = self.open_iterator(skip=saved["position"], loads_skipped=loads_samples)
        except StateMismatch:
            return None, False
        return iterator, saved.get("order", self.progress.order) == self.progress.order

    def _draw_order_anew(self, saved: dict[str, Any], *, loads_samples: bool) -> tuple[Any, bool]:
        """Return the same as `_draw_order`, beginning with the randomness of the pass's start."""
        self.restart_progress()
        self.rewind_all()
        with suppress(Exception):  # a dataset may raise anything
            return self._draw_order(saved, loads_samples=loads_samples)
        return None, False

    def _order_ahead(self, number: int | None = None) -> list[Any] | None:
        """Return the number and digest of the lists that are drawn ahead for workers, if any."""
        iterator = self._last_iterator()
        if self.kind != "map" or not isinstance(iterator, WorkersIterator):
            return None
        return list(iterator.order_ahead(number))

    def _compare_ahead(self, saved: list[Any] | None) -> None:
        """Report lists drawn ahead for the workers that are not those drawn before the stop."""
        now = None if saved is None else self._order_ahead(saved[0])
        if saved is not None and now is not None and now[0] == saved[0] and now != saved:
            self._samplers.report_drawn_ahead(saved[0])

    def rewind_all(self) -> None:
        """Restore all randomness as at the beginning of the pass."""
        self.restore_data(self._data_before)
        self._rewind()

    def restart_progress(self) -> None:
        """Count the pass from its start."""
        self.progress = self._progress()

    def _progress(self, position: int = 0, samples: int = 0, workers: Any = ()) -> Progress:
        return Progress(position, samples, dict(workers), self._changing)

    def _first_assignment(self) -> Assignment | None:
        if isinstance(self.resharder, str) or self._order_inputs_before is None:
            return None
        return self.resharder.first_assignment(
            self._order_inputs_before, self._rng_before, reused=self._reuses_workers
        )

    def _restore_assignment(self, saved: dict[str, Any]) -> None:
        # between plain passes there is no assignment, and none is needed
        self._rng_before, self._order_inputs_before = saved["rng_before"], saved["before"]
        self._reuses_workers, self._ids = saved["reused"], None
        dealt = saved.get("deal")
        self.assignment = Assignment(**dealt) if dealt is not None else self._first_assignment()

    def open_iterator(self, skip: int, *, loads_skipped: bool = False) -> Any:
        """Return an iterator over the pass, this many batches in."""
        self._numbers.restore_of_loop()
        plan = Plan(
            skip=skip,
            workers=self.progress.workers,
            base_seed=self._base_seed if skip or self._reuses_workers else None,
            rewind=self._rewind if self._reuses_workers else None,
            watch=None if self._replays else Watch(self._generator_roots),
            loop_numbers=self._numbers.of_loop,
            compares=self.kind == "iterable",
            before_fetch=None if self._trials is None else self._trials.record_fetch,
            loads_skipped=loads_skipped,
        )
        loader = copy.copy(self._loader)
        if self._ids is not None:
            self.required_resharder.set_ids(loader, self._ids)
        with self._numbers.as_workers_start():
            iterator = make_iterator(loader, self.progress, plan)
        self._has_iterated = True
        self._base_seed = iterator._base_seed
        self._had_workers = False
        self._last_iterator = weakref.ref(iterator)
        self._persistent_iterator = iterator if self._persistent else None
        return iterator

    def _rewind(self) -> None:
        assert self._rng_before is not None
        assert self._order_inputs_before is not None
        set_main_rng(self._rng_before)
        sampler.restore(self._loader, self._order_inputs_before)

    def capture_data(self) -> DataState:
        """Return the state inside the dataset, the collate_fn and unknown samplers."""
        roots = self._generator_roots
        generators = randomness.capture({**roots, **sampler.unknown_samplers(self._loader)})
        return DataState(generators, carried_state.capture(roots))

    def restore_data(self, saved: DataState) -> None:
        """Restore the result of `capture_data`; report generators that cannot be."""
        roots = self._generator_roots
        carried_state.restore(roots, saved.carried)
        roots = {**roots, **sampler.unknown_samplers(self._loader)}
        lost = randomness.restore(roots, saved.generators, self._name)
        if lost:
            self._report(Restored(self._name, How.NOT_KEPT, lost))

    def _randomness(self) -> tuple[dict[str, Any], DataState]:
        return main_rng(), self.capture_data()

    def _restore_randomness(self, saved: tuple[dict[str, Any], DataState]) -> None:
        main, data = saved
        set_main_rng(main)
        self.restore_data(data)

    def _pass_numbers_now(self) -> dict[str, float]:
        return known_streams.pass_numbers(self._loader.dataset) if self._replays else {}

    @property
    def _generator_roots(self) -> dict[str, Any]:
        """Objects that may hold generators; a stream with state restores its own."""
        roots = {"dataset": self._loader.dataset, "collate_fn": self._loader.collate_fn}
        if self._stream is not None:
            roots = known_streams.outside_state(roots)
            roots.pop("dataset", None)
        return roots
