"""Track a loader with a position of its own, such as torchdata's StatefulDataLoader.

Its own state is saved and loaded; state missing from that is unknown here. In addition, generators
inside the loader are saved (randomness.py) and restored if its own resume leaves them
untouched.

Some loaders begin late: they make their first draws, such as a seed for workers, with the first
batch and not at `iter`. So the source records the generators moved by the batches of a pass:

    each batch           loading data draws from it: restore it before the first batch
    the first one only   the loader begins late: fetch the first batch after a resume with the
                         generator as at the beginning of the pass; restore the main ones after that
"""

from __future__ import annotations

import itertools
import types
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.data import randomness
from trainckpt.data.iterable import StatefulStream
from trainckpt.data.iterators import Progress
from trainckpt.data.pass_history import fingerprint
from trainckpt.data.randomness import main_rng, packed_rng, set_main_rng
from trainckpt.data.resharding import ALTERNATIVE_HINT, Assignment, EpochResharder
from trainckpt.data.sampler import length
from trainckpt.data.untracked import shield_shutdown
from trainckpt.data.worker import kill_on_shutdown, kill_workers, signals_blocked
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.exactness import Report


MAIN_GENERATORS = "main"  # Python's, NumPy's and torch's global generators, as one


class StatefulSource:
    """A loader with its own state_dict and load_state_dict. Methods as in `LoaderSource`."""

    kind = "stateful"
    assignment: Assignment | None = None
    order = b""  # index lists are unknown

    def __init__(self, loader: Any, name: str, report: Report) -> None:
        self.progress = Progress()
        self.resharder: EpochResharder | str = (
            f"a {type(loader).__qualname__} keeps its position itself, in a form that cannot "
            f"be dealt over other ranks; use a torch DataLoader, and {ALTERNATIVE_HINT}"
        )
        self._loader = loader
        self._name = name
        self._report = report
        self._stream = StatefulStream(
            name,
            loader,
            report,
            iterate=self._open_iterator,
            generators=(self._randomness, self._restore_randomness),
            asks=False,
        )
        self._rng_before: dict[str, Any] | None = None
        self._first_resumed: bytes | None = None  # fingerprint of a resumed pass's first batch
        self._generators_before: dict[str, bytes] = {}
        self._last_iterator: Any = None
        self._has_begun = False
        # taken now: generators inside iterators are left out
        self._generator_paths = randomness.capture({"loader": loader}).keys()
        # generators moved by a pass's first, and by its later, batches
        self._moved_generators: list[list[str] | None] = [None, None]

    def start(self) -> Iterator[Any]:
        """Begin a pass."""
        rng, generators = main_rng(), self._generators()
        before, self._generators_before = self._generators_before, generators
        self.progress, self._rng_before = Progress(), rng
        if self._stream.is_between:
            if self._stream.ended_in_this_process:
                batches = self._open_iterator()
                first = list(itertools.islice(batches, 1))
                if first and fingerprint(first[0]) != self._first_resumed:
                    self._stream.clear_resume()
                    return self._count_batches(itertools.chain(first, batches), start=0)
                self._restore_randomness({**rng, **generators})
            self._stream.begin_pass()
            self._restore_generators(self._generators_at_start(before, generators))
        self._has_begun = True
        return self._count_batches(self._open_iterator(), start=0)

    def resume(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Resume the saved pass in its middle."""
        self._rng_before = saved["rng_before"]
        self._generators_before = before = saved.get("data before", {})
        if self._rng_before is not None:
            set_main_rng(self._rng_before)
        self._restore_generators(before)
        batches = self._open_iterator()
        self._has_begun = True
        late = self._late_generators(batches)
        untouched = [key for key, state in self._generators().items() if before.get(key) == state]
        now = saved.get("data now", {})
        self._restore_generators(
            {key: now[key] for key in untouched if key in now and key not in late}
        )
        if MAIN_GENERATORS in late:
            first = list(itertools.islice(batches, 1))
            batches = itertools.chain(first, batches)
        return self._count_batches(batches, start=saved["position"], is_resumed=True)

    def abandon(self) -> None:
        """End a pass left in its middle."""
        self._end(exhausted=False)
        self.progress = Progress()

    def finish(self) -> None:
        """End a pass that has run out."""
        self._end(exhausted=True)

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return this source's part of the loader's state."""
        # before the first pass, asking for the loader's own state may draw
        has_own_state = self._has_begun or self._stream.is_between
        return {
            "position": self.progress.position,
            "rng_before": self._rng_before if in_pass else None,
            "data before": self._generators_before,
            "data now": self._generators(),
            "drew": list(self._moved_generators),
            "own": self._stream.state if has_own_state else None,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load a saved state."""
        self.shutdown()
        self.progress = Progress(saved["position"], saved["samples"])
        self._moved_generators = list(saved.get("drew", (None, None)))
        if saved["in_pass"]:
            self._stream.resume_pass(saved["own"])
            return
        self._generators_before = saved.get("data before", {})
        self._restore_generators(saved.get("data now", {}))
        if saved["own"] is not None:
            self._stream.resume_between(saved["own"], exhausted=saved["exhausted"])

    def undo_draws(self, saved: dict[str, Any]) -> None:
        """Undo draws since the load."""
        self._restore_generators(saved.get("data now", {}))

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal for an exact resume."""
        return {
            "num_workers": getattr(self._loader, "num_workers", None),
            "class": type(self._loader).__qualname__,
            "length": length(self._loader),
        }

    def problems(self) -> list[str]:
        """Return the parts of the loader that cannot be exact."""
        return []  # state missing from the loader's own is unknown

    def shutdown(self) -> None:
        """Kill the workers now."""
        if self._last_iterator is not None:
            kill_workers(self._last_iterator)
        self._last_iterator = None

    def _end(self, *, exhausted: bool) -> None:
        self._stream.end_pass(exhausted=exhausted)
        self._rng_before = None

    def _generators_at_start(
        self, before: dict[str, bytes], now: dict[str, bytes]
    ) -> dict[str, bytes]:
        """Return the generators at the beginning of a pass after one whose end was loaded.

        A loader that goes through the old pass once more draws from them for that pass as well.
        """
        once, again = self._stream.sample_generators()
        if any(once[key] != again[key] for key in once.keys() - now.keys()):
            self._stream.leave_previous_pass()  # the main ones have moved since the old pass began
            return now
        return {
            key: before.get(key, now[key]) if once[key] != again[key] else now[key] for key in now
        }

    def _late_generators(self, batches: Iterator[Any]) -> set[str]:
        """Return the generators that a late loader draws from with the first batch of a pass."""
        first, later = self._moved_generators
        is_lazy = isinstance(batches, types.GeneratorType)
        if first is None:  # an older version saved it
            return {MAIN_GENERATORS} if is_lazy else set()
        if later is None:  # saved after the first batch ever
            return {
                key for key in first if (is_lazy if key == MAIN_GENERATORS else "sampler" in key)
            }
        if is_lazy and MAIN_GENERATORS in first and MAIN_GENERATORS in later:
            reason = (
                f"{self._name}: {type(self._loader).__qualname__} draws from the main random "
                "generators as it begins a pass and for each batch, so what it draws for the first "
                "batch after a resume is not known; data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.INFERRED, reason))
            return {*first} - {*later} | {MAIN_GENERATORS}
        return {*first} - {*later}

    def _open_iterator(self) -> Iterator[Any]:
        loader = self._loader
        context = getattr(loader, "multiprocessing_context", None) or torch.multiprocessing
        restarts = getattr(loader, "restart_on_stop_iteration", False)
        try:
            if restarts:  # else torchdata's nodes would begin another pass at the end of one
                loader.restart_on_stop_iteration = False
            if getattr(loader, "num_workers", 0):
                with signals_blocked(context.get_start_method()):
                    iterator: Iterator[Any] = iter(loader)
                kill_on_shutdown(iterator)
                shield_shutdown(type(iterator))
            else:
                iterator = iter(loader)
        finally:
            if restarts:
                loader.restart_on_stop_iteration = restarts
        self._last_iterator = iterator
        return iterator

    def _count_batches(
        self, batches: Iterator[Any], *, start: int, is_resumed: bool = False
    ) -> Iterator[Any]:
        self._first_resumed = None
        progress, size = self.progress, getattr(self._loader, "batch_size", None) or 1
        for number in itertools.count(start):
            slot = min(number, 1)
            is_recorded = self._moved_generators[slot] is None
            before = self._randomness() if is_recorded else {}
            try:
                batch = next(batches)
            except StopIteration:
                return
            if is_recorded:
                after = self._randomness()
                moved = [key for key in after if after[key] != before.get(key)]
                self._moved_generators[slot] = sorted(
                    {key if key in self._generator_paths else MAIN_GENERATORS for key in moved}
                )
            if is_resumed and number == start:
                self._first_resumed = fingerprint(batch)
            progress.position += 1
            progress.samples += size  # index lists are unknown
            yield batch

    def _generators(self) -> dict[str, bytes]:
        states = randomness.capture({"loader": self._loader})
        return {path: state for path, state in states.items() if path in self._generator_paths}

    def _randomness(self) -> dict[str, bytes]:
        return {**packed_rng(), **self._generators()}

    def _restore_randomness(self, saved: dict[str, bytes]) -> None:
        set_main_rng(saved)
        self._restore_generators({key: saved[key] for key in self._generator_paths if key in saved})

    def _restore_generators(self, saved: dict[str, bytes]) -> None:
        lost = randomness.restore({"loader": self._loader}, saved, self._name)
        if lost:
            self._report(Restored(self._name, How.NOT_KEPT, lost))
