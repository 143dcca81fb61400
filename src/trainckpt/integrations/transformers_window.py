"""The Trainer's windows: it takes all micro-batches of a window at once, we hand them out singly.

It needs the whole window first, because it divides each loss by the tokens of all of it. So the
window is fetched as the Trainer fetches it, at the window's first boundary, and the Trainer gets an
object that passes a boundary before each further micro-batch. After a resume inside a window the
divisor is taken from the snapshot, and only what is left of the window is fetched again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.data.ahead import AheadSource
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.accelerate_loader import ShardReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.data.loader import TrackedIterator
    from trainckpt.format.exactness import Report


class Left(BaseException):
    """A stop with `on_stop="return"`: the Trainer's loop is left in the middle of a window."""


class WindowReader(ShardReader):
    """The Trainer's loader, read window by window; see `data.ahead.Reader`.

    Args:
        shard: The loader as Accelerate prepared it.
        collect: The Trainer's own get_batch_samples.

    Attributes:
        whole: Micro-batches of the window being handed out.
        left: How many of them were not handed out yet.
        items: What the Trainer divides their losses by; None if it does not.
    """

    def __init__(self, shard: Any, collect: Callable[..., tuple[list[Any], Any]]) -> None:
        super().__init__(shard)
        self.whole = self.left = 0
        self.items: Any = None
        self._collect = collect
        self._asked: tuple[int, Any] = (1, None)

    def ask(self, number: int, device: Any) -> None:
        """What the Trainer wants of the next window."""
        self._asked = (number, device)

    def read(self, open_it: Callable[[], Iterator[Any]], *, resumed: bool) -> Iterator[Any]:
        """One pass, micro-batch by micro-batch."""
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
        """Accelerate's epoch, and the window that is open."""
        items = self.items if self.left else None
        return {**super().state(), "whole": self.whole, "left": self.left, "items": items}

    def load(self, state: dict[str, Any]) -> None:
        """Take that back."""
        super().load(state)
        self.whole, self.left, self.items = state["whole"], state["left"], state["items"]


class _Counted:
    """Batches, and those that were taken."""

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
    """What `Checkpointer` is given in place of the Trainer's loader."""

    def __init__(self, reader: WindowReader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader.shard)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._reader.shard)

    def __trainckpt_source__(self, name: str, report: Report) -> AheadSource:
        return AheadSource(self._reader, self._reader.shard.base_dataloader, name, report)


class Window:
    """What is left of a window, as the Trainer's loop takes it.

    Args:
        first: The micro-batch that was taken when the window began.
        iterator: Gives the others, each after a boundary.
        reader: Knows how many there are.
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
                raise Left from None
            yield batch
