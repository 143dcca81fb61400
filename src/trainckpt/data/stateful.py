"""A loader that keeps its own position, such as torchdata's StatefulDataLoader.

Its state is asked for and handed back; what it forgets is not known here. Beside it go the
generators of its own that it holds (own_random.py), where its own resume leaves them untouched.

Some begin late: what they draw to begin with, such as a seed for workers, they draw with the first
batch and not when `iter` is called. So it is noted which generators the batches of a pass move:

    each batch           it is drawn from as data is loaded: put back before the first batch
    the first one only   it begins late: the first batch after a resume is fetched with it as it was
                         when the pass began; the main ones are put back after that

Used by: sources.py.
"""

from __future__ import annotations

import itertools
import types
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.data import own_random
from trainckpt.data.dealing import INSTEAD, Deal, Dealer
from trainckpt.data.fingerprint import fingerprint
from trainckpt.data.iterators import Progress
from trainckpt.data.randomness import main_rng, packed_rng, set_main_rng
from trainckpt.data.sampler import length
from trainckpt.data.shield import adopt, kill_workers, shielded
from trainckpt.data.streams import Stream
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.exactness import Report


MAIN = "main"  # Python's, NumPy's and torch's global generators, as one


class StatefulSource:
    """Anything with its own state_dict and load_state_dict. As `sources.LoaderSource`."""

    kind = "stateful"
    deal: Deal | None = None

    def __init__(self, loader: Any, name: str, report: Report) -> None:
        self.progress = Progress()
        self.dealer: Dealer | str = (
            f"a {type(loader).__qualname__} keeps its position itself, in a form that nobody can "
            f"deal over other ranks; use a torch DataLoader, and {INSTEAD}"
        )
        self._loader = loader
        self._name = name
        self._report = report
        self._stream = Stream(
            name,
            loader,
            report,
            iterate=self._opened,
            generators=(self._randomness, self._put_randomness),
            asks=False,
        )
        self._rng_before: dict[str, Any] | None = None
        self._came_back: bytes | None = None  # the batch that a resumed pass went on with
        self._generators_before: dict[str, bytes] = {}
        self._latest: Any = None
        self._begun = False
        self._paths = own_random.capture({"loader": loader}).keys()  # what iterators hold is theirs
        self._drew: list[list[str] | None] = [None, None]  # what a pass's first, and later batches

    def start(self) -> Iterator[Any]:
        """Begin a pass as the object itself would."""
        rng, generators = main_rng(), self._generators()
        before, self._generators_before = self._generators_before, generators
        self.progress, self._rng_before = Progress(), rng
        if self._stream.is_between:
            if self._stream.ended_here:
                batches = self._opened()
                first = list(itertools.islice(batches, 1))
                if first and fingerprint(first[0]) != self._came_back:
                    self._stream.stay()
                    return self._counted(itertools.chain(first, batches), at=0)
                self._put_randomness({**rng, **generators})
            self._stream.begin_pass()
            self._put_generators(self._to_begin_with(before, generators))
        self._begun = True
        return self._counted(self._opened(), at=0)

    def resume(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Go on with the saved pass, as the object's own load_state_dict does."""
        self._rng_before = saved["rng_before"]
        self._generators_before = before = saved.get("data before", {})
        if self._rng_before is not None:
            set_main_rng(self._rng_before)
        self._put_generators(before)
        batches = self._opened()
        self._begun = True
        late = self._late(batches)
        untouched = [key for key, state in self._generators().items() if before.get(key) == state]
        now = saved.get("data now", {})
        self._put_generators({key: now[key] for key in untouched if key in now and key not in late})
        if MAIN in late:
            first = list(itertools.islice(batches, 1))
            batches = itertools.chain(first, batches)
        return self._counted(batches, at=saved["position"], is_back=True)

    def abandon(self) -> None:
        """A pass was left in its middle."""
        self._end(exhausted=False)
        self.progress = Progress()

    def finish(self) -> None:
        """A pass has run out."""
        self._end(exhausted=True)

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return the object's own state; None before its first pass, as asking may draw."""
        return {
            "position": self.progress.position,
            "rng_before": self._rng_before if in_pass else None,
            "data before": self._generators_before,
            "data now": self._generators(),
            "drew": list(self._drew),
            "own": self._stream.state if self._begun or self._stream.is_between else None,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Hand the object its own state back."""
        self.shutdown()
        self.progress = Progress(saved["position"], saved["samples"])
        self._drew = list(saved.get("drew", (None, None)))
        if saved["in_pass"]:
            self._stream.resume_pass(saved["own"])
            return
        self._generators_before = saved.get("data before", {})
        self._put_generators(saved.get("data now", {}))
        if saved["own"] is not None:
            self._stream.resume_between(saved["own"], exhausted=saved["exhausted"])

    def put_back_last(self, saved: dict[str, Any]) -> None:
        """The pass after a state between passes begins: undo what was drawn since it was loaded."""
        self._put_generators(saved.get("data now", {}))

    def facts(self) -> dict[str, Any]:
        """Return what must be equal for a saved state to be exact here."""
        return {
            "num_workers": getattr(self._loader, "num_workers", None),
            "class": type(self._loader).__qualname__,
            "length": length(self._loader),
        }

    def problems(self) -> list[str]:
        """Nothing is known of what the object itself forgets."""
        return []

    def shutdown(self) -> None:
        """Kill the workers now, if the object's iterator has any."""
        if self._latest is not None:
            kill_workers(self._latest)
        self._latest = None

    def _end(self, *, exhausted: bool) -> None:
        self._stream.end_pass(exhausted=exhausted)
        self._rng_before = None

    def _to_begin_with(self, before: dict[str, bytes], now: dict[str, bytes]) -> dict[str, bytes]:
        """Return the generators with which a pass begins after one whose end was loaded.

        A loader that goes through the old pass once more draws from them for that one as well.
        """
        once, again = self._stream.draws()
        if any(once[key] != again[key] for key in once.keys() - now.keys()):
            self._stream.leave_last()  # as the main ones have moved on since the old pass began
            return now
        return {
            key: before.get(key, now[key]) if once[key] != again[key] else now[key] for key in now
        }

    def _late(self, batches: Iterator[Any]) -> set[str]:
        """Return the generators that are drawn from at a pass's first batch, to begin it."""
        first, later = self._drew
        is_lazy = isinstance(batches, types.GeneratorType)
        if first is None:  # an older version saved it
            return {MAIN} if is_lazy else set()
        if later is None:  # saved after the first batch ever
            return {key for key in first if (is_lazy if key == MAIN else "sampler" in key)}
        if is_lazy and MAIN in first and MAIN in later:
            why = (
                f"{self._name}: {type(self._loader).__qualname__} draws from the main random "
                "generators as it begins a pass and for each batch, so what it draws for the first "
                "batch after a resume is not known; data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.INFERRED, why))
            return {*first} - {*later} | {MAIN}
        return {*first} - {*later}

    def _opened(self) -> Iterator[Any]:
        loader = self._loader
        context = getattr(loader, "multiprocessing_context", None) or torch.multiprocessing
        restarts = getattr(loader, "restart_on_stop_iteration", False)
        try:
            if restarts:  # torchdata's nodes would begin another pass where one goes on at its end
                loader.restart_on_stop_iteration = False
            if getattr(loader, "num_workers", 0):
                with shielded(context.get_start_method()):
                    iterator: Iterator[Any] = iter(loader)
                adopt(iterator)
            else:
                iterator = iter(loader)
        finally:
            if restarts:
                loader.restart_on_stop_iteration = restarts
        self._latest = iterator
        return iterator

    def _counted(self, batches: Iterator[Any], *, at: int, is_back: bool = False) -> Iterator[Any]:
        self._came_back = None
        progress, size = self.progress, getattr(self._loader, "batch_size", None) or 1
        for number in itertools.count(at):
            which = min(number, 1)
            is_looked_at = self._drew[which] is None
            before = self._randomness() if is_looked_at else {}
            try:
                batch = next(batches)
            except StopIteration:
                return
            if is_looked_at:
                after = self._randomness()
                moved = [key for key in after if after[key] != before.get(key)]
                self._drew[which] = sorted({key if key in self._paths else MAIN for key in moved})
            if is_back and number == at:
                self._came_back = fingerprint(batch)
            progress.position += 1
            progress.samples += size  # its index lists are out of sight
            yield batch

    def _generators(self) -> dict[str, bytes]:
        found = own_random.capture({"loader": self._loader})
        return {path: state for path, state in found.items() if path in self._paths}

    def _randomness(self) -> dict[str, bytes]:
        return {**packed_rng(), **self._generators()}

    def _put_randomness(self, saved: dict[str, bytes]) -> None:
        set_main_rng(saved)
        self._put_generators({key: saved[key] for key in self._paths if key in saved})

    def _put_generators(self, saved: dict[str, bytes]) -> None:
        lost = own_random.restore({"loader": self._loader}, saved, self._name)
        if lost:
            self._report(Restored(self._name, How.NOT_KEPT, lost))
