"""Deliver the micro-batches of a Trainer's window one by one.

The Trainer needs the whole window first: it divides each loss by the tokens of all of it. So the
window is fetched by the Trainer's own method, at the window's first boundary. The Trainer gets an
object with a boundary before each further micro-batch. After a resume inside a window the divisor
comes from the snapshot, and only the rest of the window is fetched again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.data.prefetching_source import PrefetchingSource
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.accelerate_loader import ShardReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.data.loader import TrackedIterator
    from trainckpt.format.exactness import Report


class WindowAborted(BaseException):
    """A stop with `on_stop="return"` leaves the Trainer's loop in the middle of a window."""


class WindowReader(ShardReader):
    """The Trainer's loader, read window by window; see `data.prefetching_source.Reader`.

    Args:
        shard: The loader prepared by Accelerate.
        collect: The Trainer's own get_batch_samples.

    Attributes:
        whole: Number of micro-batches of the present window.
        left: Number of those not delivered yet.
        items: The Trainer's divisor of their losses; None if it has none.
    """

    def __init__(self, shard: Any, collect: Callable[..., tuple[list[Any], Any]]) -> None:
        super().__init__(shard)
        self.whole = self.left = 0
        self.items: Any = None
        self._collect = collect
        self._asked: tuple[int, Any] = (1, None)

    def ask(self, number: int, device: Any) -> None:
        """Set the Trainer's arguments for the next window."""
        self._asked = (number, device)

    def read(self, open_it: Callable[[], Iterator[Any]], *, resumed: bool) -> Iterator[Any]:
        """Yield one pass, micro-batch by micro-batch."""
        batches = super().read(open_it, resumed=resumed)
        if resumed and self.left:
            yield from self._hand_out([next(batches) for _ in range(self.left)])
        while True:
            counted = _Counted(batches)
            window, self.items = self._collect(counted, *self._asked)
            if len(window) != len(counted.taken):
                what = f"makes {len(window)} micro-batches of {len(counted.taken)}"
                raise _refusal(what)
            if any(given is not taken for given, taken in zip(window, counted.taken, strict=True)):
                raise _refusal("makes other micro-batches of those that it takes")
            if not window:
                return
            self.whole = len(window)
            yield from self._hand_out(window)

    def _hand_out(self, window: list[Any]) -> Iterator[Any]:
        self.left = len(window)
        for batch in window:
            self.left -= 1
            yield batch

    def state(self) -> dict[str, Any]:
        """Return Accelerate's epoch, and the open window."""
        items = self.items if self.left else None
        return {**super().state(), "whole": self.whole, "left": self.left, "items": items}

    def load(self, state: dict[str, Any]) -> None:
        """Restore that state."""
        super().load(state)
        self.whole, self.left, self.items = state["whole"], state["left"], state["items"]


class _Counted:
    """An iterator with a list of the batches taken."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.taken: list[Any] = []
        self._batches = batches

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.taken.append(batch)
        return batch


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"get_batch_samples of this Trainer {what}, so none of them is a place in the data",
        hint="leave get_batch_samples as it is in transformers.Trainer; what changes a batch "
        "belongs into the collator or training_step",
    )


class TrainedLoader:
    """The loader argument of `Checkpointer` for the Trainer's loader."""

    def __init__(self, reader: WindowReader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader.shard)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._reader.shard)

    def __trainckpt_source__(self, name: str, report: Report) -> PrefetchingSource:
        return PrefetchingSource(self._reader, self._reader.shard.base_dataloader, name, report)


class Window:
    """The rest of a window, as iterated by the Trainer's loop.

    Args:
        first: The micro-batch taken when the window began.
        iterator: Yields the others, each after a boundary.
        reader: Has the number of micro-batches.
        begin: Called with the whole window's number of micro-batches, before the first.
    """

    def __init__(
        self,
        first: Any,
        iterator: TrackedIterator,
        reader: WindowReader,
        begin: Callable[[int], None],
    ) -> None:
        self._first = first
        self._iterator = iterator
        self._length = reader.left + 1
        self._whole = reader.whole
        self._begin = begin

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._begin(self._whole)
        yield self._first
        for _ in range(self._length - 1):
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise WindowAborted from None
            yield batch
