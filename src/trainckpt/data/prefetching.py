"""Track a DataLoader read ahead of training by a framework: by a batch or by a whole window.

Frameworks put a reader between a DataLoader and the training loop. Accelerate's looks one batch
ahead, to recognise the last one; the Transformers Trainer takes a window at once. Batches inside
the reader are fetched but not trained. The position counts *returned* batches; the batches
between are fetched again after a resume, each under the same randomness as the first time.

    before each fetch    record the state of the loader underneath and, if a fetch draws from it,
                         the main randomness; drop both once the batch is returned
    a state              the oldest record, and the main randomness of every later fetch
    a resume             the loader underneath resumes at the oldest record, the batches are
                         fetched again, and handed to the reader on its requests

So a run with a reader makes the same draws as without tracking, one by one. The integration
provides the reader, see `PrefetchReader`. `PrefetchingSource` has the methods of every source
(`sources.py`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainckpt.data.iterators import Progress
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.data.sources import LoaderSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from trainckpt.data.resharding import Assignment
    from trainckpt.format.exactness import Report


class PrefetchReader(Protocol):
    """A framework's reader between a DataLoader and the training loop.

    Attributes:
        elsewhere: Reason why its order cannot be shared among other ranks, and an alternative.
    """

    elsewhere: str

    def read(self, open_it: Callable[[], Iterator[Any]], *, resumed: bool) -> Iterator[Any]:
        """Return one pass. Call `open_it` at the point where the reader makes its iterator."""

    def goes_on(self) -> None:
        """Restore the epoch of the source before a saved pass resumes and fetches anything."""

    def was_over(self) -> None:
        """Resume a pass already read to its end, without reading again."""

    def state(self) -> dict[str, Any]:
        """Return the reader's own state as plain values."""

    def load(self, state: dict[str, Any]) -> None:
        """Restore the reader's state, before `read`."""

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal for a saved state to be exact here."""


class Fetched(NamedTuple):
    """A batch fetched but not returned: the state before it, and the samples including it."""

    before: dict[str, Any]
    rng: dict[str, Any] | None
    samples: int


class PrefetchingSource:
    """A plain DataLoader, read through a `PrefetchReader`."""

    kind = "ahead"
    assignment: Assignment | None = None

    def __init__(
        self, reader: PrefetchReader, loader: DataLoader[Any], name: str, report: Report
    ) -> None:
        self.progress = Progress()
        self.resharder = reader.elsewhere
        self._reader = reader
        self._inner = LoaderSource(loader, name, report)
        self._draws_in_main_process = loader.num_workers == 0
        self._iterator: Iterator[Any] | None = None
        self._prefetched: deque[Fetched] = deque()  # fetched and not returned, oldest first
        self._refetched: deque[Any] = deque()  # of those: fetched again, and not requested yet

    @property
    def order(self) -> bytes:
        """Digest of the index lists consumed in the running pass."""
        return self._inner.order

    def start(self) -> Iterator[Any]:
        """Begin a pass."""
        self._clear()
        self.progress = Progress()
        return self._count_returned(self._reader.read(self._open, resumed=False))

    def resume(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Resume the saved pass in its middle."""
        self._clear()
        self._reader.goes_on()
        self._iterator = self._inner.resume(saved["under"])
        self.progress = Progress(saved["position"], saved["samples"])
        for rng in saved["again"]:
            if rng is not None:
                set_main_rng(rng)
            self._refetched.append(self._fetch())
        if not saved["again"]:
            self._reader.was_over()
            return iter(())
        return self._count_returned(self._reader.read(self._open, resumed=True))

    def abandon(self) -> None:
        """End a pass left in its middle."""
        self._inner.abandon()
        self._clear()
        self.progress = Progress()

    def finish(self) -> None:
        """End a pass that has run out."""
        self._inner.finish()
        self._clear()

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return this source's part of the loader's state."""
        prefetched = list(self._prefetched) if in_pass else []
        return {
            "position": self.progress.position,
            "under": prefetched[0].before if prefetched else self._inner_state(in_pass),
            "again": [fetched.rng for fetched in prefetched],
            "reader": self._reader.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load a saved state."""
        self.shutdown()
        self._clear()
        self._inner.load(saved["under"])
        self._reader.load(saved["reader"])
        self.progress = Progress(saved["position"], saved["samples"])

    def undo_draws(self, saved: dict[str, Any]) -> None:
        """Undo draws since the load."""
        self._inner.undo_draws(saved["under"])

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal for an exact resume."""
        return {**self._inner.facts(), **self._reader.facts()}

    def problems(self) -> list[str]:
        """Return the parts of the loader that cannot be exact."""
        return self._inner.problems()

    def shutdown(self) -> None:
        """Kill the workers now."""
        self._inner.shutdown()

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._inner.start()
        return _PrefetchingIterator(self)

    def next_for_reader(self) -> Any:
        """Return the reader's next batch: one fetched before, if any."""
        return self._refetched.popleft() if self._refetched else self._fetch()

    def _fetch(self) -> Any:
        assert self._iterator is not None
        before = self._inner_state(in_pass=True)
        rng = main_rng() if self._draws_in_main_process else None
        batch = next(self._iterator)
        self._prefetched.append(Fetched(before, rng, self._inner.progress.samples))
        return batch

    def _count_returned(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.progress.samples = self._prefetched.popleft().samples
            self.progress.position += 1
            yield batch

    def _inner_state(self, in_pass: bool) -> dict[str, Any]:
        # the keys that `resume` and `load` of the source underneath read
        progress = self._inner.progress
        counted = {"samples": progress.samples, "batches": progress.position, "in_pass": in_pass}
        return {**self._inner.state(in_pass), **counted}

    def _clear(self) -> None:
        self._iterator = None
        self._prefetched.clear()
        self._refetched.clear()


class _PrefetchingIterator:
    """Iterator given to the reader in place of the loader's own."""

    def __init__(self, source: PrefetchingSource) -> None:
        self._source = source

    def __iter__(self) -> _PrefetchingIterator:
        return self

    def __next__(self) -> Any:
        return self._source.next_for_reader()
