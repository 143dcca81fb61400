"""Track a loader's position, and resume from it without loading a batch twice.

Only *returned* batches count, as trained on; batches fetched ahead by workers do not.
Order of events in each `__next__`:

    1  on_boundary()         may raise; may call state(), which covers the batches returned so far
    2  the iterator          made at the first __next__ only, so that a state can still be loaded
                             after iter(); in the middle of a pass: under the saved randomness,
                             with the current randomness put back afterwards
    3  before_first_fetch()  once after a load: the owner restores the main randomness, last
    4  the batch             with num_workers=0 this draws from the main randomness

A state between passes holds the randomness from before the iterator is made, and making it draws
from that: then 3 comes before 2. In both cases the main randomness is restored at the same point
where it was recorded.

Another data-parallel world resumes at the start of the optimizer window: `load_in_other_world`
shares the rest of that pass among the ranks of this world. Its workers start as in a new pass, so
here too 3 comes before 2.

Without a load_state the draws are those of the plain loader, one by one. Only the training thread
may iterate, save or load; one pass runs at a time.

A loop may leave a loaded pass without a request. `zip` asks the first loader first. Suppose the run
stopped at that loader's last batch. After the resume both loaders are in their saved passes, the
first one ends at once, and the second one is never asked. A dropped iterator is then the only sign
of the second loader's abandoned pass.
"""

from __future__ import annotations

import dis
import sys
import warnings
import weakref
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

from trainckpt.data import resharding, state_differences
from trainckpt.data.pass_history import PassHistory, announced
from trainckpt.data.randomness import main_rng, replaced_numpy_generator, set_main_rng
from trainckpt.data.resharding import WindowStart
from trainckpt.data.sources import LoaderSource, source_of
from trainckpt.data.untracked import of_tracked_loader
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from trainckpt.format.exactness import Report


_COMPARED = 3  # passes after a load, the loaded one included; what differs later has other reasons
_LENGTH, _CHANGED_LENGTH = "dataset length", "changed length"


class RequestObserver(Protocol):
    """Observes the script's requests for batches, until it is over."""

    is_over: bool

    def on_iter(self) -> None:
        """Note that the script asks for an iterator."""

    def before_batch(self, *, is_leader: bool) -> None:
        """Note that the script asks for a batch."""


class TrackedLoader:
    """A drop-in for a loader whose position can be saved and loaded at every batch.

    Saved after batch 3 of 10 and loaded in a new process, the next `iter()` returns batches 4 to
    10 with the bits they would have had, then the next pass begins as it would have begun.

    Args:
        loader: A torch DataLoader, any iterable with state_dict and load_state_dict, or an
            integration's wrapper of its framework's loader (see sources.py).
        name: The loader's name in messages.
        on_boundary: Called first in every `__next__`.
        before_first_fetch: Called once after each `load_state`, before the first batch. Returns
            True after restoring the main generators: those held by the data are then restored too.
        leader: The loader with the boundaries, in scripts that take batches from both.
        report: Called with each part that turns out to be restored less than exactly. None: warn.
        tracked_places: Returns the id of each object with tracked attributes, and their names: a
            sampler's are restored with them.

    Attributes:
        batches: Batches returned in this pass, those before a `load_in_other_world` included.
        samples: Dataset indices in them (batch_size per batch if index lists are unknown).
        in_pass: The first `__next__` of a pass was reached and the pass has not ended.
        exhausted: The last pass ended by running out, and no new one has begun.
        passes_started: Passes begun, those of the loaded run included.
        total_batches, total_samples: Returned since this object was made, over all passes.
        after_fetch: Called with every batch before it is returned.
        early_draws: Called at each `iter()` and before each batch, until it is over.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        name: str,
        on_boundary: Callable[[], None] | None = None,
        before_first_fetch: Callable[[], bool | None] | None = None,
        after_fetch: Callable[[Any], None] | None = None,
        early_draws: RequestObserver | None = None,
        leader: TrackedLoader | None = None,
        report: Report | None = None,
        tracked_places: Callable[[], Iterable[tuple[int, str]]] | None = None,
    ) -> None:
        self._loader = loader
        self._leader = leader
        self.name = name
        self.on_boundary = on_boundary
        self.before_first_fetch = before_first_fetch
        self.batches = 0
        self.in_pass = False
        self.exhausted = False
        self.passes_started = 0
        self.total_batches = self.total_samples = 0
        # This rank's samples since the run began, less `total_samples`; None: unknown after a load.
        self._earlier_samples: int | None = 0
        self.after_fetch = after_fetch
        self._early_draws = early_draws
        self._report: Report = report or _warn
        self._loaded_pass: int | None = None  # its number, if a state was loaded in its middle
        self._first_iterator: weakref.ref[TrackedIterator] | None = None  # since that load
        self._history = PassHistory()
        # the last pass that is compared with the history, by its number
        self._last_compared_pass = 0
        self._passes_to_skip = 0
        # `passes_started` as `ckpt.epochs()` entered the running epoch; None without it
        self._epoch_start: int | None = None
        self._samples_before = 0
        self._source = source_of(loader, name, self._report, tracked_places or tuple)
        facts = self._source.facts()
        # Lengths may depend on a pass's remainder or on the epoch, so the lengths compared are
        # always those of a new loader.
        self._lengths = {key: value for key, value in facts.items() if key.endswith("length")}
        self._facts = facts
        self._pending: dict[str, Any] | None = None
        self._window_start: WindowStart | dict[str, Any] | None = None  # a dict after a load
        # ticket of the running pass's iterator; keeps no iterator alive
        self._active_ticket: object = None
        self._active_iterator: weakref.ref[TrackedIterator] | None = None

    @property
    def samples(self) -> int:
        """Dataset indices in the batches returned in this pass."""
        return self._source.progress.samples

    @property
    def running_iterator(self) -> TrackedIterator | None:
        """The iterator of the running pass, if the script has one."""
        return None if self._active_iterator is None else self._active_iterator()

    @property
    def underlying(self) -> Any:
        """The user's own loader."""
        return self._loader

    @property
    def is_stream(self) -> bool:
        """True for a DataLoader of an IterableDataset."""
        return self._source.kind == "iterable"

    @property
    def padding(self) -> int:
        """Ids trained again, over all ranks, to even out the ranks in this or the last pass."""
        resharder, assignment = self._source.resharder, self._source.assignment
        if isinstance(resharder, str) or assignment is None:
            return 0
        return resharder.padding(assignment)

    def __iter__(self) -> TrackedIterator:
        if self._early_draws is not None and not self._early_draws.is_over:
            self._early_draws.on_iter()
        iterator = TrackedIterator(self)
        if self._first_iterator is None:
            self._first_iterator = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_loader":  # not constructed yet: copy or pickle is asking
            raise AttributeError(attribute)
        return getattr(self._loader, attribute)

    def state(self) -> dict[str, Any]:
        """Return the position after the batches returned so far; never changed later."""
        self._abandon_if_dropped()
        if self._pending is not None:
            own = {"window": self._window(), "epoch_start": self._epoch_start}
            return {**self._pending, **own}
        return self._build_state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from a saved state with the next pass. Earlier iterators may still begin it.

        Raises:
            StateMismatch: The state is of another kind of loader. Nothing else is refused here.
        """
        if state.get("elsewhere"):
            self.load_in_other_world(state)
            return
        differences = self.differences(state)
        if state["kind"] != self._source.kind:
            raise StateMismatch(f"{self.name} cannot go on", differences)
        self._active_ticket = None
        history = {} if differences else state.get("passes", {})
        self._history = PassHistory(**history)
        last_compared = state["passes_started"] + _COMPARED - state["in_pass"]
        self._last_compared_pass = last_compared if history else 0
        with of_tracked_loader():
            self._source.load(state)
        self.batches, self.passes_started = state["batches"], state["passes_started"]
        self.in_pass, self.exhausted = state["in_pass"], state["exhausted"]
        self._pending, self._window_start = dict(state), state.get("window")
        self._epoch_start = state.get("epoch_start")
        earlier = state.get("run_samples")
        self._earlier_samples = None if earlier is None else earlier - self.total_samples
        self._record_load()

    def record_window_start(self) -> None:
        """Record that an optimizer window begins here: another world will resume from this batch.

        Called at a boundary, before the batch is fetched, or between passes. Takes a microsecond.
        """
        source, pending = self._source, self._pending
        if isinstance(source.resharder, str) or (pending is not None and pending.get("elsewhere")):
            return  # the order cannot be shared; or this is the loaded window start
        self._abandon_if_dropped()
        self._window_start = WindowStart(
            in_pass=self.in_pass,
            exhausted=self.exhausted,
            passes_started=self.passes_started,
            batches=self.batches,
            samples=source.progress.samples,
            position=source.progress.position,
            deal=source.assignment if self.in_pass else None,
        )

    def load_in_other_world(self, state: dict[str, Any]) -> None:
        """Resume in another data-parallel world, at the start of the saved state's window.

        The state of any rank will do: all ranks of one data world agree. The next pass trains the
        rest of the window's epoch, shared among the ranks known to this loader's sampler. The later
        epochs are plain. A window that began between passes resumes with a plain pass.

        Raises:
            StateMismatch: The order cannot be shared among this world; names an alternative.
        """
        differences = self.differences_in_other_world(state)
        if differences:
            raise StateMismatch(
                f"{self.name} cannot go on with another number of ranks", differences
            )
        self._active_ticket = None
        self._window_start = window = state["window"]
        self._loader_source().load_in_other_world(window)
        self.batches, self.passes_started = window["batches"], window["passes_started"]
        self.in_pass, self.exhausted = window["in_pass"], window["exhausted"]
        self._earlier_samples = None  # the state may be another rank's
        self._history, self._last_compared_pass = PassHistory(), 0
        self._epoch_start = state.get("epoch_start")
        self._pending = {**self._build_state(between=True), "elsewhere": True}
        self._record_load()

    def run_samples(self, fallback: int) -> int:
        """Return this rank's samples since the run began.

        Args:
            fallback: The number if the loaded state is of an older release or another world.
        """
        if self._earlier_samples is None:
            self._earlier_samples = fallback - self.total_samples
        return self._earlier_samples + self.total_samples

    def differences_in_other_world(
        self, state: dict[str, Any], processes: tuple[int, int] | None = None
    ) -> list[str]:
        """Return the reasons against resuming a saved state in another data world.

        Args:
            state: The state of any rank.
            processes: Number of processes in the saved run and now. If given, rank-unaware samplers
                under several processes are named.
        """
        window = state.get("window")
        is_between_passes = window is not None and not (window["in_pass"] or window["begun"])
        if is_between_passes and self.on_boundary is None:
            processes = None  # no batch of it is left to share: an evaluation loader, say
        return resharding.differences(self.name, state, self._source.resharder, processes)

    def differences(self, state: dict[str, Any], accepted: Collection[str] = ()) -> list[str]:
        """Return each mismatch that makes a saved state inexact here, one sentence each.

        Mismatches of the `accepted` facts are left out.
        """
        facts = {**self._source.facts(), **self._lengths}
        return state_differences.differences(self.name, state, self._source.kind, facts, accepted)

    def changed_facts(self, state: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return fact -> saved value and present one, of those that differ."""
        return state_differences.changed(state, {**self._source.facts(), **self._lengths})

    def problems(self) -> list[Restored]:
        """Return the parts of this loader that cannot be exact."""
        problems = self._source.problems()
        replaced = replaced_numpy_generator()
        if replaced is not None:
            problems.append(
                f"{self.name}: NumPy's global generator was replaced by {replaced}, whose state "
                "is not kept"
            )
        return [Restored(self.name, How.NOT_KEPT, sentence) for sentence in problems]

    def _record_load(self) -> None:
        self._loaded_pass = self.passes_started if self.in_pass else None
        self._first_iterator = None

    @property
    def _ended_loaded_pass(self) -> bool:
        is_in_it = self.in_pass and self.passes_started == self._loaded_pass
        return self._loaded_pass is not None and not is_in_it

    def _abandon_if_dropped(self) -> None:
        """Leave a pass without boundaries once its iterator was dropped: its loop is over."""
        if self.on_boundary is not None:
            return
        if self._pending is not None:
            leader, first = self._leader, self._first_iterator
            is_dropped = first is not None and first() is None
            if self.in_pass and is_dropped and leader is not None and leader._ended_loaded_pass:
                self._begin()
                self.abandon_pass()
        elif self._active_iterator is not None and self._active_iterator() is None:
            self.abandon_pass()

    def abandon_pass(self) -> None:
        """End the running pass early: its epoch is over."""
        if self.in_pass and self._pending is None:
            self._source.abandon()
            self._end_pass(exhausted=False)
            self._active_ticket = None

    def count_passes_of_epochs(self) -> None:
        """Count the passes of each epoch from now on: the script loops over `ckpt.epochs()`."""
        if self._epoch_start is None:
            self._epoch_start = self.passes_started - self.in_pass

    def enter_epoch(self) -> None:
        """Begin an epoch; a pass that still runs is over."""
        self.abandon_pass()
        if self._epoch_start is not None:
            self._epoch_start = self.passes_started

    @property
    def earlier_passes(self) -> int:
        """Passes of the running epoch that are over; 0 outside `ckpt.epochs()`."""
        if self._epoch_start is None:
            return 0
        return max(0, self.passes_started - self.in_pass - self._epoch_start)

    @property
    def skips_next_pass(self) -> bool:
        """True if the next pass is to be skipped."""
        return self._passes_to_skip > 0

    def skip_passes(self, number: int) -> None:
        """End the next passes at once, without a boundary: they were over before the resume."""
        self._passes_to_skip = number

    def shutdown(self) -> None:
        """Kill the workers now. The running pass cannot resume; a new one can begin."""
        self._active_ticket = None
        self._source.shutdown()

    def _enter(self, iterator: TrackedIterator) -> None:
        # an iterator's first __next__: a pass running before has been left
        if self._active_ticket is iterator.ticket:
            return
        self._abandon_if_dropped()
        self.abandon_pass()
        self._active_ticket, self._active_iterator = iterator.ticket, weakref.ref(iterator)

    def _begin(self) -> Iterator[Any]:
        saved = self._pending
        resumes_in_pass = saved is not None and saved["in_pass"]
        restores_rng_first = saved is not None and (not resumes_in_pass or saved.get("elsewhere"))
        if restores_rng_first:
            are_restored = self._call_before_first_fetch()
            if are_restored and saved is not None and not saved.get("elsewhere"):
                self._source.undo_draws(saved)
        batches = self._source.start() if saved is None else self._resume_pass(saved)
        self._pending = None
        self._samples_before = self.samples
        if not resumes_in_pass:
            facts = self._source.facts()
            self._report_length((saved or {}).get(_CHANGED_LENGTH), facts)
            self._facts = {**facts, **self._lengths}
            self._history = replace(self._history, announced=announced(facts))
            self.batches, self.exhausted = 0, False
            self.passes_started += 1
            if self._window_start is not None and self._source.assignment is not None:
                self._window_start = resharding.with_begun_pass(
                    self._window_start, self._source.assignment
                )
        self.in_pass = True
        if saved is not None and not restores_rng_first:
            self._call_before_first_fetch()
        return batches

    def _resume_pass(self, saved: dict[str, Any]) -> Iterator[Any]:
        if saved.get("elsewhere"):
            window = saved["window"]
            # an order that came from random generators is drawn again
            if saved["in_pass"] or window["order"]["rng"] is not None:
                return self._loader_source().resume_in_other_world(window)
        if not saved["in_pass"]:
            return self._source.start()
        current_rng = main_rng()
        try:
            return self._source.resume(saved)
        finally:
            set_main_rng(current_rng)

    def _build_state(self, *, between: bool = False) -> dict[str, Any]:
        earlier = self._earlier_samples
        return {
            "kind": self._source.kind,
            "facts": self._facts,
            "batches": self.batches,
            "samples": self.samples,
            "run_samples": None if earlier is None else earlier + self.total_samples,
            "in_pass": self.in_pass,
            "exhausted": self.exhausted,
            "passes_started": self.passes_started,
            "padding": self.padding,
            "elsewhere": False,
            "window": self._window(),
            "epoch_start": self._epoch_start,
            "passes": asdict(self._history),
            **self._changed_length(),
            **self._source.state(self.in_pass and not between),
        }

    def _changed_length(self) -> dict[str, int]:
        """Return the dataset's length, if it is another than as the loader was made."""
        now: int | None = self._source.facts().get(_LENGTH)
        return {} if now is None or now == self._lengths.get(_LENGTH) else {_CHANGED_LENGTH: now}

    def _report_length(self, saved: int | None, facts: dict[str, Any]) -> None:
        """Report samples that the loop added or removed, and that are not so in a resumed run."""
        now = facts.get(_LENGTH)
        if saved is None or saved == now or now != self._lengths.get(_LENGTH):
            return  # another length than at the start: the script has set it since
        reason = (
            f"{self.name}: the dataset had {saved} samples when it was saved, and has {now} as at "
            "the start: what the loop adds or removes is not kept. Give the dataset state_dict and "
            "load_state_dict. Data differs from the uninterrupted run"
        )
        self._report(Restored(self.name, How.NOT_KEPT, reason))

    def _window(self) -> dict[str, Any] | None:
        start = self._window_start
        if not isinstance(start, WindowStart):
            return start
        source = self._loader_source()
        return resharding.window_as_dict(start, source.required_resharder, source.next_assignment)

    def _loader_source(self) -> LoaderSource:
        assert isinstance(self._source, LoaderSource)
        return self._source

    def _consume_skip(self, *, by_loop: bool) -> bool:
        """Return True if this pass is to be skipped.

        `by_loop`: False if the script calls `next` itself. It makes its next iterator when one
        ends, so only one that had ended may end again, and the next one has to go on.
        """
        skips = self._passes_to_skip > 0 and (by_loop or not self.in_pass)
        self._passes_to_skip = self._passes_to_skip - 1 if skips and by_loop else 0
        return skips

    def _count_batch(self) -> None:
        self.batches += 1
        self.total_batches += 1
        self.total_samples += self.samples - self._samples_before
        self._samples_before = self.samples
        self._report_fault(self._history.excess(self.batches))

    def _finish_pass(self) -> None:
        assignment, order = self._source.assignment, self._source.order
        self._source.finish()
        if assignment is None or assignment.plain:
            self._report_fault(self._history.fault(self.batches, order))
            self._history = self._history.add(self.batches, order)
        else:  # the rest of a pass that another world had begun
            self._history = PassHistory()
        self._end_pass(exhausted=True)

    def _report_fault(self, fault: str) -> None:
        if not fault or self.passes_started > self._last_compared_pass:
            return
        reason = (
            f"{self.name}: after the resume, the pass of epoch {self.passes_started - 1} {fault}; "
            "data may differ from the uninterrupted run"
        )
        self._report(Restored(self.name, How.NOT_KEPT, reason))
        self._history = PassHistory()  # report once

    def _call_before_first_fetch(self) -> bool:
        """Return True if the main random generators were restored."""
        return self.before_first_fetch is not None and bool(self.before_first_fetch())

    def _end_pass(self, *, exhausted: bool) -> None:
        self.in_pass, self.exhausted = False, exhausted
        if not exhausted:
            self.batches, self._history = 0, PassHistory()


def _warn(part: Restored) -> None:
    warnings.warn(part.reason, stacklevel=6)


class TrackedIterator:
    """Iterator over one pass. Draws and starts nothing before its first `__next__`."""

    def __init__(self, loader: TrackedLoader) -> None:
        self.ticket = object()
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._is_over = False

    @property
    def loader_name(self) -> str:
        """The loader's name in messages."""
        return self._loader.name

    def __iter__(self) -> TrackedIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        loader = self._loader
        if self._batches is None and loader.skips_next_pass and not self._is_over:
            frame = sys._getframe(1)
            by_loop = "CALL" not in dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self._is_over = loader._consume_skip(by_loop=by_loop)
        if self._is_over:
            raise StopIteration
        self._check_active()
        if loader._early_draws is not None and not loader._early_draws.is_over:
            loader._early_draws.before_batch(is_leader=loader.on_boundary is not None)
        if loader.on_boundary is not None:
            loader.on_boundary()
        with of_tracked_loader():
            return self._next_batch()

    def _next_batch(self) -> Any:
        loader = self._loader
        if self._batches is None:
            self._batches = loader._begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over, self._batches = True, None
            loader._finish_pass()
            raise
        except Exception:
            loader._history = PassHistory()  # a batch that could not be loaded is missing
            raise
        loader._count_batch()
        if loader.after_fetch is not None:
            loader.after_fetch(batch)
        return batch

    def _check_active(self) -> None:
        if self._batches is None:
            self._loader._enter(self)
        elif self._loader._active_ticket is not self.ticket:
            raise ConfigurationError(
                f"{self._loader.name}: this pass was left: another began, or a state was loaded",
                hint="run one pass over a tracked loader at a time",
            )
