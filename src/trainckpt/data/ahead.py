"""A pass whose reader fetches ahead of what is trained: by a batch, or by a whole window.

Frameworks put a reader between a DataLoader and the training loop. Accelerate's looks one batch
ahead, to know the last one; the Transformers Trainer takes a window at once. What the reader holds
is fetched and not trained: the position is that of the batches *returned*, and what lies between is
fetched again after a resume, each batch under the randomness it was fetched under the first time.

    before each fetch    the state of the loader underneath and, where a fetch draws from it, the
                         main randomness are noted; both are forgotten once the batch is returned
    a state              the oldest note, and the main randomness of every fetch after it
    a resume             the loader underneath goes on at the oldest note, the batches are fetched
                         again, and handed to the reader when it asks for them

So a run that uses a reader draws what it would draw without being tracked, one by one. The reader
is an object of the integration's, see `Reader`.

Used by: the integrations, through a loader's `__trainckpt_source__` (see sources.py).
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

    from trainckpt.data.dealing import Deal
    from trainckpt.format.exactness import Report


class Reader(Protocol):
    """What stands between a DataLoader and the loop.

    Attributes:
        elsewhere: Why nobody can deal its order over other ranks, and what to do.
    """

    elsewhere: str

    def read(self, open_it: Callable[[], Iterator[Any]], *, resumed: bool) -> Iterator[Any]:
        """Return one pass. `open_it` makes the iterator underneath, when the reader would."""

    def goes_on(self) -> None:
        """A saved pass goes on: bring what it reads to its epoch, before anything is fetched."""

    def was_over(self) -> None:
        """A pass goes on that had been read to its end, so it is not read again."""

    def state(self) -> dict[str, Any]:
        """Return what the reader itself remembers; plain values."""

    def load(self, state: dict[str, Any]) -> None:
        """Take that back, before `read`."""

    def facts(self) -> dict[str, Any]:
        """Return what must be equal for a saved state to be exact here."""


class Fetched(NamedTuple):
    """A batch that is fetched and not returned: what was before it, and samples with it."""

    before: dict[str, Any]
    rng: dict[str, Any] | None
    samples: int


class AheadSource:
    """A plain DataLoader, read through a `Reader`."""

    kind = "ahead"
    deal: Deal | None = None

    def __init__(self, reader: Reader, loader: DataLoader[Any], name: str, report: Report) -> None:
        self.progress = Progress()
        self.dealer = reader.elsewhere
        self._reader = reader
        self._under = LoaderSource(loader, name, report)
        self._draws = loader.num_workers == 0
        self._iterator: Iterator[Any] | None = None
        self._ahead: deque[Fetched] = deque()  # fetched and not returned, oldest first
        self._again: deque[Any] = deque()  # of those, what the reader has still to ask for

    def start(self) -> Iterator[Any]:
        """Begin a pass as the reader itself would."""
        self._forget()
        self.progress = Progress()
        return self._returned(self._reader.read(self._open, resumed=False))

    def resume(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Go on with the saved pass; fetches again what was not returned."""
        self._forget()
        self._reader.goes_on()
        self._iterator = self._under.resume(saved["under"])
        self.progress = Progress(saved["position"], saved["samples"])
        for rng in saved["again"]:
            if rng is not None:
                set_main_rng(rng)
            self._again.append(self._fetch())
        if not saved["again"]:
            self._reader.was_over()
            return iter(())
        return self._returned(self._reader.read(self._open, resumed=True))

    def abandon(self) -> None:
        """A pass was left in its middle."""
        self._under.abandon()
        self._forget()
        self.progress = Progress()

    def finish(self) -> None:
        """A pass is over."""
        self._under.finish()
        self._forget()

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return the position of what was returned, and how to fetch the rest again."""
        under = self._ahead[0].before if in_pass and self._ahead else self._described(in_pass)
        return {
            "position": self.progress.position,
            "under": under,
            "again": [fetched.rng for fetched in self._ahead] if in_pass else [],
            "reader": self._reader.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Take a saved state."""
        self.shutdown()
        self._forget()
        self._under.load(saved["under"])
        self._reader.load(saved["reader"])
        self.progress = Progress(saved["position"], saved["samples"])

    def put_back_last(self, saved: dict[str, Any]) -> None:
        """The pass after a state between passes begins."""
        self._under.put_back_last(saved["under"])

    def facts(self) -> dict[str, Any]:
        """Return what must be equal for a saved state to be exact here."""
        return {**self._under.facts(), **self._reader.facts()}

    def problems(self) -> list[str]:
        """Return what about this loader cannot be exact, one sentence each."""
        return self._under.problems()

    def shutdown(self) -> None:
        """Kill the workers now."""
        self._under.shutdown()

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._under.start()
        return _Fetches(self)

    def take(self) -> Any:
        """Return the next batch to the reader; one that was fetched before, where there is one."""
        return self._again.popleft() if self._again else self._fetch()

    def _fetch(self) -> Any:
        assert self._iterator is not None
        before, rng = self._described(in_pass=True), main_rng() if self._draws else None
        batch = next(self._iterator)
        self._ahead.append(Fetched(before, rng, self._under.progress.samples))
        return batch

    def _returned(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.progress.samples = self._ahead.popleft().samples
            self.progress.position += 1
            yield batch

    def _described(self, in_pass: bool) -> dict[str, Any]:
        # what `resume` and `load` of the source underneath ask of a loader's state
        progress = self._under.progress
        counted = {"samples": progress.samples, "batches": progress.position, "in_pass": in_pass}
        return {**self._under.state(in_pass), **counted}

    def _forget(self) -> None:
        self._iterator = None
        self._ahead.clear()
        self._again.clear()


class _Fetches:
    """What the reader reads from in place of the loader's own iterator."""

    def __init__(self, source: AheadSource) -> None:
        self._source = source

    def __iter__(self) -> _Fetches:
        return self

    def __next__(self) -> Any:
        return self._source.take()
