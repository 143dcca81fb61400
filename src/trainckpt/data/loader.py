"""A loader that knows where it is, and can be put back there without loading a batch twice.

It counts what was *returned*, that is, trained on; what workers fetched ahead is not part of it.
What happens in each `__next__`, in this order:

    1  on_boundary()         may raise; may call state(): it describes the batches returned so far
    2  the iterator          made at the first __next__ only, so that a state can still be loaded
                             after iter(); in the middle of a pass: under the saved randomness,
                             which is put back to what it was before
    3  before_first_fetch()  once after a load: the owner restores the main randomness, last
    4  the batch             with num_workers=0 this draws from the main randomness

A state taken between passes holds randomness from before the iterator is made, and making it draws
from that: then 3 comes before 2. Either way the main randomness is restored at the very place where
it was recorded.

Another data-parallel world goes on at the start of the optimizer window, which `mark_window` notes:
`load_elsewhere` deals what is left of that pass over the ranks of this world. Its workers start as
in a new pass, so here too 3 comes before 2.

Without a load_state the draws are those of the plain loader, one by one. Only the trainer's thread
may iterate, save or load; one pass runs at a time.

Used by: the lifecycle (through the front door's `track`).
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from trainckpt.data import compare, window
from trainckpt.data.loaded_pass import LoadedPass
from trainckpt.data.randomness import main_rng, replaced_numpy_generator, set_main_rng
from trainckpt.data.sources import LoaderSource, source_of
from trainckpt.data.window import Mark
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.format.exactness import Report


class TrackedLoader:
    """A drop-in for a loader, whose position can be saved and loaded at every batch.

    Saved after batch 3 of 10 and loaded in a new process, the next `iter()` returns batches 4 to
    10 with the bits they would have had, then the next pass begins as it would have begun.

    Args:
        loader: A torch DataLoader, any iterable with state_dict and load_state_dict, or what an
            integration makes of its framework's loader (see sources.py).
        name: What messages call it.
        on_boundary: Called first in every `__next__`.
        before_first_fetch: Called once after each `load_state`, before the first batch. True if it
            has put the random generators back: those that the data holds then come back too.
        leader: The loader whose boundaries a script passes that takes batches of this one as well.
        report: Told how a resume goes on, where that turns out to be less than exactly; None: a
            warning says so.

    Attributes:
        batches: Batches returned in this pass, those before a `load_elsewhere` included.
        samples: Dataset indices in them (batch_size per batch where index lists are out of sight).
        in_pass: The first `__next__` of a pass was reached and the pass has not ended.
        exhausted: The last pass ended by running out, and no new one has begun.
        passes_started: Passes begun, those of the loaded run included.
        total_batches, total_samples: Returned since this object was made, over all passes.
        after_fetch: Called with every batch before it is returned, if set.
        loaded_pass: The pass that a state was loaded in the middle of.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        name: str,
        on_boundary: Callable[[], None] | None = None,
        before_first_fetch: Callable[[], bool | None] | None = None,
        leader: TrackedLoader | None = None,
        report: Report | None = None,
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
        # Of this rank since the run began, less `total_samples`; None: a loaded state did not say.
        self._earlier_samples: int | None = 0
        self.after_fetch: Callable[[Any], None] | None = None
        self._report: Report = report or _warn
        self.loaded_pass = LoadedPass()
        self._skips_next_pass = False
        self._samples_before = 0
        self._source = source_of(loader, name, self._report)
        facts = self._source.facts()
        # Lengths may depend on what a pass leaves over, or on the epoch: what is compared are those
        # of loaders that have just been made.
        self._lengths = {key: value for key, value in facts.items() if key.endswith("length")}
        self._facts = facts
        self._pending: dict[str, Any] | None = None
        self._mark: Mark | dict[str, Any] | None = None  # a dict if it was loaded
        self._turn: object = None  # the ticket of the iterator whose pass it is; keeps none alive
        self._holder: weakref.ref[TrackedIterator] | None = None

    @property
    def samples(self) -> int:
        """Dataset indices in the batches returned in this pass."""
        return self._source.progress.samples

    @property
    def is_stream(self) -> bool:
        """Return True for a DataLoader of an IterableDataset."""
        return self._source.kind == "iterable"

    @property
    def padding(self) -> int:
        """Ids that all ranks together train again in this or the last pass, to get equally many."""
        dealer, deal = self._source.dealer, self._source.deal
        return 0 if isinstance(dealer, str) or deal is None else dealer.padding(deal)

    @property
    def padding_ids(self) -> list[int]:
        """Those ids. Finding them takes as long as shuffling the epoch."""
        dealer, deal = self._source.dealer, self._source.deal
        return [] if isinstance(dealer, str) or deal is None else dealer.padding_ids(deal)

    def remaining_batches(self) -> int:
        """Return how many batches are left of this pass or, between passes, the next one has."""
        dealer, deal = self._source.dealer, self._source.deal
        if not self.in_pass:
            return len(self)
        if isinstance(dealer, str) or deal is None:
            return len(self) - self.batches
        return dealer.batches(deal) - self._source.progress.position

    def __iter__(self) -> TrackedIterator:
        iterator = TrackedIterator(self)
        self.loaded_pass.make(iterator)
        return iterator

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_loader":  # not constructed yet: copy or pickle is asking
            raise AttributeError(attribute)
        return getattr(self._loader, attribute)

    def state(self) -> dict[str, Any]:
        """Return the position as of the batches returned so far; never changed later."""
        self._leave_if_dropped()
        if self._pending is not None:
            return {**self._pending, "window": self._window()}
        return self._described()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state with the next pass; iterators made before may still begin it.

        What `differences` names is not refused here, only another kind of loader.
        """
        if state.get("elsewhere"):
            self.load_elsewhere(state)
            return
        if state["kind"] != self._source.kind:
            raise StateMismatch(f"{self.name} cannot go on", self.differences(state))
        self._turn = None
        self._source.load(state)
        self.batches, self.passes_started = state["batches"], state["passes_started"]
        self.in_pass, self.exhausted = state["in_pass"], state["exhausted"]
        self._pending, self._mark = dict(state), state.get("window")
        earlier = state.get("run_samples")
        self._earlier_samples = None if earlier is None else earlier - self.total_samples
        self.loaded_pass.load(self)

    def mark_window(self) -> None:
        """Note that an optimizer window begins here: another world will go on from this place.

        Called at a boundary, before the batch is fetched, or between passes. Takes a microsecond.
        """
        source, pending = self._source, self._pending
        if isinstance(source.dealer, str) or (pending is not None and pending.get("elsewhere")):
            return  # nobody could deal it; or this is the window's start that was loaded
        self._leave_if_dropped()
        self._mark = Mark(
            self.in_pass,
            self.exhausted,
            self.passes_started,
            self.batches,
            source.progress.samples,
            source.progress.position,
            source.deal if self.in_pass else None,
        )

    def load_elsewhere(self, state: dict[str, Any]) -> None:
        """Go on in another data-parallel world, at the start of the saved state's window.

        Any rank's state will do: those of one data world agree. The next pass trains what is left
        of the window's epoch, dealt over the ranks that this loader's sampler knows; the epochs
        after it are plain. A window that began between passes goes on with a plain pass.

        Raises:
            StateMismatch: it cannot be dealt over this world; says what to use instead.
        """
        found = self.differences_elsewhere(state)
        if found:
            raise StateMismatch(f"{self.name} cannot go on with another number of ranks", found)
        self._turn = None
        self._mark = mark = state["window"]
        self._dealing_source().load_elsewhere(mark)
        self.batches, self.passes_started = mark["batches"], mark["passes_started"]
        self.in_pass, self.exhausted = mark["in_pass"], mark["exhausted"]
        self._earlier_samples = None  # another rank's
        self._pending = {**self._described(between=True), "elsewhere": True}
        self.loaded_pass.load(self)

    def run_samples(self, otherwise: int) -> int:
        """Return this rank's samples since the run began.

        Args:
            otherwise: What they are if the loaded state is of an older release or another world.
        """
        if self._earlier_samples is None:
            self._earlier_samples = otherwise - self.total_samples
        return self._earlier_samples + self.total_samples

    def differences_elsewhere(
        self, state: dict[str, Any], processes: tuple[int, int] | None = None
    ) -> list[str]:
        """Return why a saved state cannot go on in another data world, one sentence each.

        Args:
            state: Any rank's.
            processes: How many the run had and has. If given, samplers that know nothing of ranks
                are named where several processes use them.
        """
        mark = state.get("window")
        rests = mark is not None and not (mark["in_pass"] or mark["begun"])
        if rests and self.on_boundary is None:
            processes = None  # no batch of it is to be dealt: an evaluation's, say
        return window.differences(self.name, state, self._source.dealer, processes)

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Return what makes a saved state not exactly loadable here, one sentence each."""
        return compare.differences(self.name, state, self._source.kind, self._current_facts())

    def problems(self) -> list[Restored]:
        """Return what about this loader cannot be exact."""
        found = self._source.problems()
        replaced = replaced_numpy_generator()
        if replaced is not None:
            found.append(
                f"{self.name}: NumPy's global generator was replaced by {replaced}, whose state "
                "is not kept"
            )
        return [Restored(self.name, How.NOT_KEPT, sentence) for sentence in found]

    def _leave_if_dropped(self) -> None:
        """Nobody holds the iterator of a pass without boundaries: its loop was left."""
        if self.on_boundary is not None:
            return
        if self._pending is not None:
            if self.in_pass and self.loaded_pass.was_left(self._leader):
                self._begin()
                self.leave_pass()
        elif self._holder is not None and self._holder() is None:
            self.leave_pass()

    def leave_pass(self) -> None:
        """The running pass will not go on: the epoch it belonged to is over."""
        if self.in_pass and self._pending is None:
            self._source.abandon()
            self._end(exhausted=False)
            self._turn = None

    @property
    def skips_next_pass(self) -> bool:
        """It was told to skip a pass, and has not done so yet."""
        return self._skips_next_pass

    def skip_next_pass(self) -> None:
        """Let the next pass end at once, without a boundary: it was over before the resume."""
        self._skips_next_pass = True

    def shutdown(self) -> None:
        """Kill the workers now. The running pass cannot go on; a new one can begin."""
        self._turn = None
        self._source.shutdown()

    def _enter(self, iterator: TrackedIterator) -> None:
        # an iterator's first __next__: whatever pass was running before has been left
        if self._turn is iterator.ticket:
            return
        self._leave_if_dropped()
        self.leave_pass()
        self._turn, self._holder = iterator.ticket, weakref.ref(iterator)

    def _begin(self) -> Iterator[Any]:
        saved = self._pending
        going_on = saved is not None and saved["in_pass"]
        makes_anew = saved is not None and (not going_on or saved.get("elsewhere"))
        if makes_anew and self._first_fetch() and saved and not saved.get("elsewhere"):
            self._source.put_back_last(saved)
        batches = self._source.start() if saved is None else self._go_on(saved)
        self._pending = None
        self._samples_before = self.samples
        if not going_on:
            self._facts = self._current_facts()
            self.batches, self.exhausted = 0, False
            self.passes_started += 1
            if self._mark is not None and self._source.deal is not None:
                self._mark = window.begun_since(self._mark, self._source.deal)
        self.in_pass = True
        if saved is not None and not makes_anew:
            self._first_fetch()
        return batches

    def _go_on(self, saved: dict[str, Any]) -> Iterator[Any]:
        if saved.get("elsewhere") and (saved["in_pass"] or window.was_drawn(saved["window"])):
            return self._dealing_source().resume_elsewhere(saved["window"])
        if not saved["in_pass"]:
            return self._source.start()
        here = main_rng()
        try:
            return self._source.resume(saved)
        finally:
            set_main_rng(here)

    def _current_facts(self) -> dict[str, Any]:
        return {**self._source.facts(), **self._lengths}

    def _described(self, *, between: bool = False) -> dict[str, Any]:
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
            **self._source.state(self.in_pass and not between),
        }

    def _window(self) -> dict[str, Any] | None:
        mark = self._mark
        if not isinstance(mark, Mark):
            return mark
        source = self._dealing_source()
        return window.written(mark, source.the_dealer, source.next_deal)

    def _dealing_source(self) -> LoaderSource:
        assert isinstance(self._source, LoaderSource)
        return self._source

    def _skip(self) -> bool:
        skips, self._skips_next_pass = self._skips_next_pass, False
        return skips

    def _count(self) -> None:
        self.batches += 1
        self.total_batches += 1
        self.total_samples += self.samples - self._samples_before
        self._samples_before = self.samples

    def _first_fetch(self) -> bool:
        """Whether the random generators were put back."""
        return self.before_first_fetch is not None and bool(self.before_first_fetch())

    def _end(self, *, exhausted: bool) -> None:
        self.in_pass, self.exhausted = False, exhausted
        if not exhausted:
            self.batches = 0


def _warn(part: Restored) -> None:
    warnings.warn(part.reason, stacklevel=6)


class TrackedIterator:
    """One pass. Made by `iter(tracked)`; draws and starts nothing before its first `__next__`."""

    def __init__(self, loader: TrackedLoader) -> None:
        self.ticket = object()
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._over = False

    def __iter__(self) -> TrackedIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        loader = self._loader
        if self._over or (self._batches is None and loader._skip()):
            self._over = True
            raise StopIteration
        self._take_turn()
        if loader.on_boundary is not None:
            loader.on_boundary()
        if self._batches is None:
            self._batches = loader._begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._over, self._batches = True, None
            loader._source.finish()
            loader._end(exhausted=True)
            raise
        loader._count()
        if loader.after_fetch is not None:
            loader.after_fetch(batch)
        return batch

    def _take_turn(self) -> None:
        if self._batches is None:
            self._loader._enter(self)
        elif self._loader._turn is not self.ticket:
            raise ConfigurationError(
                f"{self._loader.name}: this pass was left: another began, or a state was loaded",
                hint="run one pass over a tracked loader at a time",
            )
