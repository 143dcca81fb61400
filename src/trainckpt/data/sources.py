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
again the returned ones. Near a pass's start a stream's first batches are loaded again, and its own
state after them is compared with the saved one. Later a stream resumes by its own state of a few
batches before. If that does not lead to the batches returned since (a shuffle buffer is not in the
state, say), the pass is loaded again. If that does not lead there either, a warning reports it.

A pass can also resume in another data-parallel world (`resume_in_other_world`): the rest of its
order is shared anew (see resharding.py), among workers that start as for a new pass.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from trainckpt.data import carried_state, compared_content, randomness, restored_numbers, sampler
from trainckpt.data.carried_state import Changing, Watch
from trainckpt.data.iterable import StatefulStream, are_equal
from trainckpt.data.iterators import (
    Plan,
    Progress,
    WorkersIterator,
    has_run_out,
    make_iterator,
    self_test,
)
from trainckpt.data.own_state import has_state, refuse_arguments
from trainckpt.data.pass_history import fingerprint
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.data.resharding import Assignment, EpochResharder, resharder_of
from trainckpt.data.restored_numbers import LoopNumbers, is_callable_object
from trainckpt.data.sampler import length
from trainckpt.data.stateful_loader import StatefulSource
from trainckpt.data.worker import kill_workers
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.data.prefetching import PrefetchingSource
    from trainckpt.format.exactness import Report


_TRIAL_INTERVAL = 8  # batches after which a stream's state is recorded for a trial
TRIAL_BATCHES = 4  # fewer may come from a wrong state by chance

Source: TypeAlias = "LoaderSource | StatefulSource | PrefetchingSource"


def source_of(loader: Iterable[Any], name: str, report: Report) -> Source:
    """Return the source for this loader, by its kind.

    Args:
        report: Called with each part that turns out to be restored less than exactly.

    Raises:
        ConfigurationError: The loader cannot be tracked.
    """
    source_type: Any = getattr(type(loader), "__trainckpt_source__", None)
    if source_type is not None:  # an integration's own source
        return source_type(loader, name, report)  # type: ignore[no-any-return]
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
    for _, inner_sampler in sampler.samplers_of(loader):
        if has_state(inner_sampler):
            refuse_arguments(inner_sampler, name)
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
    """A stream's own state some batches ago, with the inputs to test it.

    Attributes:
        at: Batches consumed at that time.
        rngs: The main randomness before each fetch since.
    """

    at: int
    own: Any
    data: dict[str, bytes]
    carried: dict[str, Any]
    rngs: list[dict[str, Any]]

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> Trial:
        """Return the trial from a result of `saved`."""
        return cls(**{name: saved[name] for name in cls._fields})._replace(rngs=[*saved["rngs"]])


class DataState(NamedTuple):
    """State inside the dataset, the collate_fn and unknown samplers, by path.

    Attributes:
        generators: Of random generators.
        carried: Of objects with a state_dict.
    """

    generators: dict[str, bytes] = {}  # noqa: RUF012 - never changed
    carried: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @classmethod
    def saved_as(cls, saved: dict[str, Any], when: str) -> DataState:
        """Return it from a source's state; `when`: "before" the pass, or "now"."""
        return cls(saved.get(f"data {when}", {}), saved.get(f"carried {when}", {}))


def _folded(digests: Iterable[bytes]) -> bytes:
    folded = b""
    for digest in digests:
        folded = fingerprint(digest, folded)
    return folded


class LoaderSource:
    """A plain DataLoader. The user's object is never changed: iterators are made over a copy.

    Attributes:
        kind: "map" or "iterable".
        progress: Consumed part of the running pass.
        resharder: `EpochResharder` of the loader's order, or the reason why there is none.
        assignment: Of the running or last pass; None before, or without a resharder.
        tracked_places: Returns the id of each object with tracked attributes, and their names.
    """

    def __init__(self, loader: DataLoader[Any], name: str, report: Report) -> None:
        self.kind = "iterable" if isinstance(loader.dataset, IterableDataset) else "map"
        self._changing = Changing(name)
        self.progress = self._progress()
        self._loader = loader
        self._name = name
        self._report = report
        self.tracked_places: Callable[[], Iterable[tuple[int, str]]] = tuple
        self._persistent = bool(loader.persistent_workers and loader.num_workers > 0)
        # persistent workers, between passes too
        self._persistent_iterator: WorkersIterator | None = None
        self._last_iterator: weakref.ref[Any] = weakref.ref(self)
        self._had_workers = False  # the saved run had workers, and this process has none yet
        self._order_inputs_before: dict[str, Any] | None = None
        self._rng_before: dict[str, Any] | None = None
        self._data_before = DataState()
        self._sampler_values_before: dict[str, Any] | None = None  # attributes of unknown samplers
        self._sampler_changed: set[str] = set()
        # numbers in the dataset as the workers started, and those of a loaded state
        self._numbers_of_workers: dict[str, Any] = {}
        self._loaded_numbers: dict[str, Any] = {}
        self._loop_numbers = LoopNumbers(self._data_objects) if self.kind == "map" else None
        self._loaded_loop_numbers: dict[str, Any] = {}
        self._cached_before: dict[str, list[Any]] = {}  # of before a stop, not made again
        # of the dataset as this process began, so that changes by the run are not compared
        self._content = compared_content.content(loader.dataset) if self.kind == "map" else {}
        self._marks = compared_content.marks(loader.dataset) if self.kind == "map" else {}
        self._trials: list[Trial] = []  # of a stream's own state: the newest, and the one before
        self._in_trial = False  # a trial of that state is running
        self._base_seed: int | None = None
        self._reuses_workers = False
        self._has_iterated = False  # an iterator, ever
        # an IterableDataset that resumes by its own state
        self._stream: StatefulStream | None = None
        if self.kind == "iterable" and not loader.num_workers and has_state(loader.dataset):
            refuse_arguments(loader.dataset, name)
            self._stream = StatefulStream(name, loader.dataset, report)
        # a stream without a state: its consumed batches are loaded again
        self._replays = self.kind == "iterable" and self._stream is None
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
        self._data_before = self._capture_data()
        self._sampler_values_before = self._sampler_values()
        self._reuses_workers = self._persistent_iterator is not None or self._had_workers
        self._ids, self.assignment = None, self._first_assignment()
        self.progress = self._progress(
            workers=self.progress.workers if self._reuses_workers else {}
        )
        self._trials = []
        if self._persistent_iterator is not None:
            self._persistent_iterator.progress = self.progress
            # not a resharded pass's
            self._persistent_iterator._index_sampler = self._loader._index_sampler
            self._persistent_iterator._reset(self._loader)
            return self._persistent_iterator
        return self._make(skip=0)

    def resume(self, saved: dict[str, Any]) -> Any:
        """Resume the saved pass in its middle."""
        self._restore_assignment(saved)
        if self.assignment is not None and not self.assignment.plain:
            self._ids = self.required_resharder.ids(self.assignment)
        if self._replays:
            self.progress = self._progress()  # the workers load everything again
        self._data_before = DataState.saved_as(saved, "before")
        self._rewind_all()
        if self.kind == "map":
            iterator = self._fast_forward(saved)
        elif saved.get("ran_out"):  # with its last batch: a load now would begin a new pass
            assert self._stream is not None
            self._stream.resume_between(saved["own"], exhausted=True)
            iterator = iter(())
        elif self._stream is not None and saved["own"] is not None:
            iterator = self._resume_by_state(self._stream, saved)
        else:
            iterator = self._make(skip=0)
        if self._replays:
            self._replay(iterator, saved)
        self.progress.position, self.progress.samples = saved["position"], saved["samples"]
        self.progress.batches_digest = saved.get("passed", b"")
        sampler.restore(self._loader, saved["now"])
        self._restore_data(DataState.saved_as(saved, "now"))
        return iterator

    def resume_in_other_world(self, window: dict[str, Any]) -> Iterator[Any]:
        """Resume at a window's start with this rank's share of the rest; workers start afresh."""
        self.assignment, position = self.required_resharder.reassign(window)
        self._ids = self.required_resharder.ids(self.assignment)
        order_inputs = sampler.capture(self._loader)
        self._rng_before, self._order_inputs_before = main_rng(), order_inputs
        self._reuses_workers = False
        self.progress = self._progress(samples=window["samples"] if window["in_pass"] else 0)
        iterator: Iterator[Any] = self._make(skip=position)
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
        self._compare_cached()
        if self._stream is not None:
            self._stream.end_pass(exhausted=exhausted)
        self._trials = []
        self._warn_of_sampler_changes()
        self._rng_before = self._order_inputs_before = None
        if not self._persistent:
            self.progress.workers = {}

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return this source's part of the loader's state."""
        has_workers = self._persistent_iterator is not None or self._had_workers
        data_before = self._data_before if in_pass else DataState()
        data_now = self._capture_data()
        state = {
            "position": self.progress.position,
            "rng_before": self._rng_before,
            "before": self._order_inputs_before,
            "inputs": sampler.inputs(self._loader),
            "now": sampler.capture(self._loader, stateful=not in_pass),
            "sampler states": self._sampler_states() if in_pass else {},
            "data before": data_before.generators,
            "data now": data_now.generators,
            "carried before": data_before.carried,
            "carried now": data_now.carried,
            "changing": sorted({*self._changing.paths, *self._sampler_changed}),
            "base_seed": self._base_seed if in_pass or has_workers else None,
            "reused": self._reuses_workers if in_pass else has_workers,
            "workers": dict(self.progress.workers),
            "order": self.progress.order,
            "ahead": self._order_ahead() if in_pass else None,
            "passed": self.progress.batches_digest,
            "content": self._content,
            "changed content": self._changed_content(),
            "cached": self._compare_cached() | self._cached(),
            "workers' numbers": self._hidden_numbers() if in_pass or has_workers else {},
            "loop numbers": {} if self._loop_numbers is None else self._loop_numbers.values(),
            "trial": self._newest_trial(),
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
        self._loaded_numbers = saved.get("workers' numbers", {})
        self._loaded_loop_numbers = saved.get("loop numbers", {})
        self._cached_before = saved.get("cached", {})
        self._restore_assignment(saved)
        if not saved["in_pass"]:  # what the script does at the head of an epoch is yet to come
            self._restore_loop_numbers()
            sampler.restore(self._loader, saved["now"])
            self._restore_data(DataState.saved_as(saved, "now"))
            if saved["own"] is not None and self._stream is not None:
                self._stream.resume_between(saved["own"], exhausted=saved["exhausted"])

    def undo_draws(self, saved: dict[str, Any]) -> None:
        """Undo draws since the load."""
        self._restore_data(DataState.saved_as(saved, "now"))
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

    def _resume_by_state(self, stream: StatefulStream, saved: dict[str, Any]) -> Any:
        trial, last_end = saved.get("trial"), saved.get("last end")
        kind, iterator = type(stream.target).__qualname__, None
        is_near_start = saved["position"] <= TRIAL_BATCHES
        if is_near_start:
            iterator = self._load_first_again(stream, saved)
        if iterator is None and trial is not None:
            iterator = self._try_state(stream, trial, saved["position"])
        if iterator is None and is_near_start:
            reason = (
                f"{self._name}: the position of {kind} is inferred: its state was taken after "
                f"{saved['batches']} batches, and a new pass begins with others, so nothing tells "
                "whether the state leads on; data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.INFERRED, reason))
        if iterator is None and (is_near_start or trial is None):
            # without a trial: an older version saved it, or the pass could not be loaded again
            iterator = self._load_state(stream, saved)
        if iterator is not None:
            stream.last_end = last_end
            return iterator
        reason = (
            f"{self._name}: the state of {kind} does not lead to the samples that came after it (a "
            f"shuffle buffer is not in it, say): {saved['batches']} batches are loaded again"
        )
        self._report(Restored(self._name, How.REPLAYED, reason))
        stream.ways_to_restart(saved["own"], last_end)[0]()
        self._rewind_all()
        iterator = self._make(skip=0)
        self._replay(iterator, saved)
        return iterator

    def _load_state(self, stream: StatefulStream, saved: dict[str, Any]) -> Any:
        """Return the iterator that the stream's own state leads to."""
        self._rewind_all()
        stream.resume_pass(saved["own"])
        iterator = self._make(skip=0)
        self._restore_data(DataState.saved_as(saved, "now"))
        return iterator

    def _load_first_again(self, stream: StatefulStream, saved: dict[str, Any]) -> Any:
        """Return the iterator after the few consumed batches, loaded again; None if others come."""
        way = None
        for restart in stream.ways_to_restart(saved["own"], saved.get("last end")):
            iterator = self._load_again(restart, saved)
            if iterator is not None and are_equal(stream.state, saved["own"]):
                return iterator
            way = way or (restart if iterator is not None else None)
        iterator = None if way is None else self._load_again(way, saved)
        if iterator is None:
            self._trials, self.progress = [], self._progress()
            return None
        reason = (
            f"{self._name}: {saved['batches']} batches are loaded again, and the state of "
            f"{type(stream.target).__qualname__} after them is not the saved one"
        )
        self._report(Restored(self._name, How.REPLAYED, reason))
        return iterator

    def _load_again(self, restart: Callable[[], None], saved: dict[str, Any]) -> Any:
        """Return the iterator at the saved position, or None if other batches came on the way."""
        rngs = [] if saved.get("trial") is None else saved["trial"]["rngs"]
        self._trials, self.progress = [], self._progress()
        with suppress(Exception):  # a dataset may raise anything
            restart()
            self._rewind_all()
            iterator = self._make(skip=0)
            for number in range(saved["batches"]):
                if number and rngs:
                    set_main_rng(rngs[number - 1])
                next(iterator)
            if self.progress.batches_digest == saved.get("passed"):
                return iterator
        return None

    def _try_state(self, stream: StatefulStream, trial: dict[str, Any], position: int) -> Any:
        """Return the iterator at a position if the earlier state leads there, else None."""
        self._in_trial = True
        try:
            stream.resume_pass(trial["own"])
            iterator = self._make(skip=0)
            self._restore_data(DataState(trial["data"], trial["carried"]))
            for _, rng in zip(range(trial["at"], position), trial["rngs"], strict=True):
                set_main_rng(rng)
                next(iterator)
        except Exception:  # noqa: BLE001 - a dataset may raise anything
            iterator = None
        finally:
            self._in_trial = False
        if iterator is not None and _folded(self.progress.digests) == trial["since"]:
            self._trials = [Trial.loaded(trial)]
            return iterator
        self.progress = self._progress()
        return None

    def _record_fetch(self) -> None:
        assert self._stream is not None
        if self._in_trial:
            return
        position = self.progress.position
        if position % _TRIAL_INTERVAL == 1:
            own = copy.deepcopy(self._stream.state)
            new = Trial(position, own, *self._capture_data(), [])
            self._trials = [*self._trials[-1:], new]
        rng = main_rng()
        for trial in self._trials:
            trial.rngs.append(rng)

    def _newest_trial(self) -> dict[str, Any] | None:
        """Return the newest trial with enough batches after it, else the oldest."""
        digests = self.progress.digests
        for trial in reversed(self._trials):
            count = self.progress.position - trial.at
            if count >= TRIAL_BATCHES or trial is self._trials[0]:
                since = itertools.islice(digests, len(digests) - count, None)
                return {**trial._asdict(), "rngs": list(trial.rngs), "since": _folded(since)}
        return None

    def _replay(self, iterator: Iterator[Any], saved: dict[str, Any]) -> None:
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
        moved = [
            worker
            for worker in current_workers
            if current_workers[worker] != saved_workers.get(worker)
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
        """Report attributes of the samplers that are not what they were at the save."""
        then, now = saved.get("inputs", {}), sampler.inputs(self._loader)
        paths = sorted(path for path, value in then.items() if now.get(path, value) != value)
        if paths:
            reason = (
                f"{self._name}: {', '.join(paths)[:200]} is not what it was at the save, and no "
                "order is kept that depends on it; give the sampler state_dict and "
                "load_state_dict, or set it between passes only and track it by "
                "trainckpt.Attributes. Data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.NOT_KEPT, reason))
        changed = saved.get("changed content", {})
        as_begun = saved.get("content", {}).items()
        self._compare_content({p: digest for p, digest in as_begun if p not in changed})
        self._compare_changed(changed)

    def _changed_content(self) -> dict[str, bytes]:
        """Return path -> digest of lists, arrays and tensors of the dataset changed by the run."""
        if not self._marks:
            return {}
        return compared_content.changed(self._loader.dataset, self._marks)

    def _compare_changed(self, saved: dict[str, bytes]) -> None:
        """Report lists, arrays and tensors that the run had changed, and the script has not."""
        paths = compared_content.others(self._loader.dataset, saved)
        if paths:
            reason = (
                f"{self._name}: {', '.join(paths)[:200]} was replaced or written during training, "
                "and is not as when it was saved: set it again before the loop asks for a batch, "
                "from what is tracked. Data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.NOT_KEPT, reason))

    def _cached(self) -> dict[str, list[Any]]:
        """Return digests of samples that the dataset keeps in this process."""
        return {} if self._loader.num_workers else compared_content.cached(self._loader.dataset)

    def _compare_cached(self) -> dict[str, list[Any]]:
        """Report samples made anew since a resume, and otherwise; return those not made yet."""
        others, self._cached_before = compared_content.cached_again(
            self._loader.dataset, self._cached_before
        )
        if others:
            self._cached_before = {}  # reported once
            reason = (
                f"{self._name}: {', '.join(others)[:200]} keeps other samples at the same keys "
                "than before the stop, so random draws made them: give the dataset state_dict and "
                "load_state_dict, or seed the draws of a sample by its index. Data differs from "
                "the uninterrupted run"
            )
            self._report(Restored(self._name, How.NOT_KEPT, reason))
        return self._cached_before

    def _compare_content(self, saved: dict[str, bytes]) -> None:
        """Report lists, arrays and tensors of the dataset that are not those of the snapshot."""
        now = self._content
        paths = sorted(path for path in saved.keys() & now if saved[path] != now[path])
        if paths:
            reason = (
                f"{self._name}: {', '.join(paths)[:200]} differs from the snapshot's, so other "
                "samples stand at the same indices: seed what splits or shuffles them, and sort "
                "what a folder lists. Data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.NOT_KEPT, reason))

    def _hidden_numbers(self) -> dict[str, Any]:
        """Return the numbers in the dataset that changed since the workers started."""
        if not self._numbers_of_workers:
            return {}
        now = restored_numbers.numbers(self._data_objects)
        then = self._numbers_of_workers.items()
        return {path: value for path, value in then if now.get(path, value) != value}

    def _fast_forward(self, saved: dict[str, Any]) -> Any:
        """Return the iterator after the consumed indices, which are drawn again and compared.

        A sampler may have a state that the loop changes in mid-pass, such as priorities. It is
        loaded then, and decides what follows. If others are drawn, by a sampler that draws alike
        each time, and no worker loads the samples, they are loaded again as well: a sample may
        draw from the sampler's generator.
        """
        is_complete = saved["position"] == (saved.get("passes") or {}).get("announced")
        values = self._sampler_values()
        iterator, is_same = self._draw_order(saved)
        draws_alike = not self._loader.num_workers and values == self._sampler_values()
        if iterator is not None and self._load_sampler_states(saved.get("sampler states", {})):
            if not is_same and not sampler.is_stateless(iterator._sampler_iter):
                self._report_order(saved, is_shorter=False)
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
            self._report_order(saved, is_shorter=iterator is None)
            return iter(()) if iterator is None else iterator
        self._compare_inputs(saved)
        if is_same:
            self._compare_ahead(saved.get("ahead"))
            return iterator
        self.progress.order = saved["order"]  # nothing is left of it
        return iter(())

    def _sampler_states(self) -> dict[str, Any]:
        """Return the states of samplers; without workers, which draw ahead of the loop."""
        with suppress(Exception):  # not every sampler has one in mid-pass
            return {} if self._loader.num_workers else sampler.states(self._loader)
        return {}

    def _load_sampler_states(self, saved: dict[str, Any]) -> bool:
        """Load states of samplers that are not as saved; return True if there were any."""
        now = self._sampler_states() if saved else {}
        if not saved or are_equal(now, saved):
            return False
        sampler.load_states(self._loader, saved)
        if not are_equal(self._sampler_states(), saved):  # it takes effect later, if at all
            sampler.load_states(self._loader, now)
            return False
        samplers = dict(sampler.samplers_of(self._loader))
        owners = " and ".join(type(samplers[name]).__qualname__ for name in saved)
        self._report(Restored(self._name, How.OWN_STATE, f"{owners}'s own state"))
        return True

    def _draw_order(
        self, saved: dict[str, Any], *, loads_samples: bool = False
    ) -> tuple[Any, bool]:
        """Return the iterator after the consumed indices, or None, and if they are the saved."""
        try:
            iterator = self._make(skip=saved["position"], loads_skipped=loads_samples)
        except StateMismatch:
            return None, False
        return iterator, saved.get("order", self.progress.order) == self.progress.order

    def _draw_order_anew(self, saved: dict[str, Any], *, loads_samples: bool) -> tuple[Any, bool]:
        """Return the same as `_draw_order`, beginning with the randomness of the pass's start."""
        self.progress = self._progress()
        self._rewind_all()
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
        if saved is None or now is None or now[0] != saved[0] or now == saved:
            return
        names = self._suspected_samplers()
        reason = (
            f"{self._name}: {names} had drawn the next {saved[0]} batches ahead for the workers, "
            "and draws others now: the loop draws from the same generator. Draw the whole order at "
            "the head of __iter__, or from a generator of the sampler's own. Data differs from the "
            "uninterrupted run"
        )
        self._report(Restored(self._name, How.NOT_KEPT, reason))

    def _sampler_suspects(self) -> dict[str, Any]:
        """Return the samplers whose order may depend on more than is kept."""
        return sampler.unknown_samplers(self._loader) or dict(sampler.samplers_of(self._loader))

    def _suspected_samplers(self) -> str:
        """Return the names of the classes of the suspected samplers."""
        return " and ".join(type(one).__qualname__ for one in self._sampler_suspects().values())

    def _report_order(self, saved: dict[str, Any], *, is_shorter: bool) -> None:
        names = self._suspected_samplers()
        count = saved["position"]
        found = (
            f"{count} batches were trained, and the order of {names} has fewer now"
            if is_shorter
            else f"the order that {names} begins with is not the one that {count} batches were "
            "trained in"
        )
        if any(has_state(one) for one in self._sampler_suspects().values()):
            advice = (
                "it depends on what the loop changes after the pass has begun; draw the whole "
                "order at the head of __iter__"
            )
        else:
            advice = (
                "it depends on more than seed, epoch and generators, or reading a sample draws "
                "from the sampler's generator too; give the sampler state_dict "
                "and load_state_dict"
            )
        reason = f"{self._name}: {found}: {advice}. Data may differ from the uninterrupted run"
        self._report(Restored(self._name, How.NOT_KEPT, reason))

    def _sampler_values(self) -> dict[str, Any]:
        roots = sampler.unknown_samplers(self._loader)
        if self._replays:
            roots["dataset"] = self._loader.dataset
        tracked = tuple(
            f"{name}.{key}"
            for owner, key in self.tracked_places()
            for name, root in roots.items()
            if id(root) == owner
        )
        values = dict(carried_state.plain_values(roots))
        return {path: value for path, value in values.items() if path not in tracked}

    def _warn_of_sampler_changes(self) -> None:
        before, self._sampler_values_before = self._sampler_values_before, None
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
        """Restore all randomness as at the beginning of the pass."""
        self._restore_data(self._data_before)
        self._rewind()

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

    def _restore_loop_numbers(self) -> None:
        if self._loop_numbers is not None:
            self._loop_numbers.restore(self._loaded_loop_numbers)
        self._loaded_loop_numbers = {}

    def _make(self, skip: int, *, loads_skipped: bool = False) -> Any:
        self._restore_loop_numbers()
        plan = Plan(
            skip=skip,
            workers=self.progress.workers,
            base_seed=self._base_seed if skip or self._reuses_workers else None,
            rewind=self._rewind if self._reuses_workers else None,
            watch=None if self._replays else Watch(self._generator_roots),
            loop_numbers=self._loop_numbers,
            compares=self.kind == "iterable",
            before_fetch=None if self._stream is None else self._record_fetch,
            loads_skipped=loads_skipped,
        )
        loader = copy.copy(self._loader)
        if self._ids is not None:
            self.required_resharder.set_ids(loader, self._ids)
        with restored_numbers.replaced(self._data_objects, self._loaded_numbers):
            if loader.num_workers:
                self._numbers_of_workers = restored_numbers.numbers(self._data_objects)
            iterator = make_iterator(loader, self.progress, plan)
        self._loaded_numbers = {}
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

    def _capture_data(self) -> DataState:
        roots = self._generator_roots
        generators = randomness.capture({**roots, **sampler.unknown_samplers(self._loader)})
        return DataState(generators, carried_state.capture(roots))

    def _restore_data(self, saved: DataState) -> None:
        roots = self._generator_roots
        carried_state.restore(roots, saved.carried)
        roots = {**roots, **sampler.unknown_samplers(self._loader)}
        lost = randomness.restore(roots, saved.generators, self._name)
        if lost:
            self._report(Restored(self._name, How.NOT_KEPT, lost))

    @property
    def _data_objects(self) -> dict[str, Any]:
        """The dataset, and the collate_fn if it is an object: their numbers may be set."""
        found = {"dataset": self._loader.dataset, "collate_fn": self._loader.collate_fn}
        return found if is_callable_object(found["collate_fn"]) else {"dataset": found["dataset"]}

    @property
    def _generator_roots(self) -> dict[str, Any]:
        """Objects that may hold generators; a stream with state restores its own."""
        roots = {"dataset": self._loader.dataset, "collate_fn": self._loader.collate_fn}
        if self._stream is not None:
            del roots["dataset"]
        return roots
