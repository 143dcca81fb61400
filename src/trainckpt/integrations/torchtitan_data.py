"""Track torchtitan's data loader, whose batches are fetched by the window.

A step of torchtitan first takes all micro-batches of its accumulation window, since it divides each
loss by the tokens of all of them, and then trains one after another. So the position counts the
micro-batches that training has begun with. Inside a window, a state holds the loader's own state
and the main randomness from before the window was fetched. A resume there fetches the whole window
again, and hands out its rest.

`WindowSource` has the methods of every source (`data.sources`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader

from trainckpt.data.iterators import Progress
from trainckpt.data.pass_history import fingerprint
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.data.stateful_loader import StatefulSource
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.data.resharding import Assignment
    from trainckpt.format.exactness import Report


class WindowLoader:
    """The loader argument of `Checkpointer` for torchtitan's loader.

    Args:
        loader: torchtitan's.
        num_micro_batches: Micro-batches of an accumulation window.
        num_parts: Batches of a micro-batch: 1, or those of a pipeline.

    Attributes:
        window: The batches of each micro-batch of the window fetched last, in order.
        num_returned: How many of its micro-batches training has begun with.
    """

    def __init__(self, loader: Any, num_micro_batches: int, num_parts: int = 1) -> None:
        self.loader = loader
        self.num_micro_batches, self.num_parts = num_micro_batches, num_parts
        self.window: list[list[Any]] = []
        self.num_returned = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "loader":  # not constructed yet: copy or pickle is asking
            raise AttributeError(attribute)
        return getattr(self.loader, attribute)

    def __trainckpt_source__(self, name: str, report: Report) -> WindowSource:
        return WindowSource(self, name, report)


class _OwnState:
    """torchtitan's loader with its position as plain values, in place of a pickle."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        method = getattr(type(loader), "state_dict", None)
        self._pickles = method is ParallelAwareDataloader.state_dict

    def state_dict(self) -> Any:
        """Return the loader's position."""
        if self._pickles:
            return StatefulDataLoader.state_dict(self._loader)
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore the loader's position."""
        if self._pickles:
            StatefulDataLoader.load_state_dict(self._loader, state)
        else:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_loader":
            raise AttributeError(attribute)
        return getattr(self._loader, attribute)


class _WindowStart(NamedTuple):
    """The loader's state, and the main randomness, before a window was fetched."""

    under: dict[str, Any]
    rng: dict[str, Any]


class WindowSource:
    """torchtitan's loader, read by the window."""

    kind = "window"
    assignment: Assignment | None = None
    order = b""  # index lists are unknown
    resharder = (
        "torchtitan's loader keeps a position for each data-parallel rank, which cannot be dealt "
        "over another number of them; resume with as many data-parallel ranks as the run had, or "
        "begin a new run with these weights (initial_load_path)"
    )

    def __init__(self, loader: WindowLoader, name: str, report: Report) -> None:
        self.progress = Progress()
        self._loader, self._name, self._report = loader, name, report
        self._inner = StatefulSource(_OwnState(loader.loader), name, report)
        self._batches: Iterator[Any] = iter(())
        self._start: _WindowStart | None = None
        self._digest = b""  # of the window's batches, if a state can lie inside it

    def start(self) -> Iterator[Any]:
        """Begin a pass."""
        self._clear()
        self._batches = self._inner.start()
        self.progress = Progress()
        return self._hand_out()

    def resume(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Resume the saved pass in its middle; the open window is fetched again."""
        self._clear()
        self._batches = self._inner.resume(saved["under"])
        self.progress = Progress(saved["position"], saved["samples"])
        if saved["returned"]:
            set_main_rng(saved["rng"])
            self._fetch()
            if self._digest != saved["digest"]:
                self._report(Restored(self._name, How.NOT_KEPT, self._otherwise()))
            self._loader.num_returned = saved["returned"]
        return self._hand_out()

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
        start = self._start if in_pass and self._is_open else None
        return {
            "position": self.progress.position,
            "under": self._inner_state(in_pass) if start is None else start.under,
            "rng": None if start is None else start.rng,
            "returned": 0 if start is None else self._loader.num_returned,
            "digest": b"" if start is None else self._digest,
            "window size": self._loader.num_micro_batches,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load a saved state."""
        self._clear()
        self._inner.load(saved["under"])
        self.progress = Progress(saved["position"], saved["samples"])

    def undo_draws(self, saved: dict[str, Any]) -> None:
        """Undo draws since the load."""
        self._inner.undo_draws(saved["under"])

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal for an exact resume."""
        facts = self._inner.facts()
        return {**facts, "class": type(self._loader.loader).__qualname__}

    def problems(self) -> list[str]:
        """Return the parts of the loader that cannot be exact."""
        return self._inner.problems()

    def shutdown(self) -> None:
        """Kill the workers now."""
        self._inner.shutdown()

    @property
    def _is_open(self) -> bool:
        return 0 < self._loader.num_returned < len(self._loader.window)

    def _hand_out(self) -> Iterator[Any]:
        loader = self._loader
        size = loader.num_parts * (getattr(loader.loader, "batch_size", None) or 1)
        while True:
            if loader.num_returned == len(loader.window) and not self._fetch():
                return
            batches = loader.window[loader.num_returned]
            loader.num_returned += 1
            self.progress.position += 1
            self.progress.samples += size
            yield batches[0] if loader.num_parts == 1 else batches

    def _fetch(self) -> bool:
        """Fetch a window; False if the data run out before its end: torchtitan drops that step."""
        loader = self._loader
        self._clear()
        if loader.num_micro_batches > 1:
            # deep: some loaders give lists that they go on filling
            self._start = _WindowStart(copy.deepcopy(self._inner_state(in_pass=True)), main_rng())
        try:
            loader.window = [
                [next(self._batches) for _ in range(loader.num_parts)]
                for _ in range(loader.num_micro_batches)
            ]
        except StopIteration:
            return False
        if self._start is not None:
            self._digest = fingerprint(loader.window)
        return True

    def _otherwise(self) -> str:
        return (
            f"{self._name}: the open window has other batches now than when it was saved: the data "
            f"have changed, or a {type(self._loader.loader).__qualname__} does not resume where "
            "its state was taken; data differ from the uninterrupted run"
        )

    def _inner_state(self, in_pass: bool) -> dict[str, Any]:
        # the keys that `resume` and `load` of the source underneath read
        counted = {
            "samples": self._inner.progress.samples,
            "in_pass": in_pass,
            "exhausted": not in_pass,
        }
        return {**self._inner.state(in_pass), **counted}

    def _clear(self) -> None:
        self._loader.window, self._loader.num_returned = [], 0
        self._start = None
