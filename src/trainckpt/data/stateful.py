"""A loader that keeps its own position, such as torchdata's StatefulDataLoader.

Its state is asked for and handed back; what it forgets, nobody here knows.

Used by: sources.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainckpt.data import streams
from trainckpt.data.dealing import INSTEAD, Deal, Dealer
from trainckpt.data.iterators import Progress
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.data.sampler import length
from trainckpt.data.shield import adopt, kill_workers, shielded

if TYPE_CHECKING:
    from collections.abc import Iterator


class StatefulSource:
    """Anything with its own state_dict and load_state_dict. As `sources.LoaderSource`."""

    kind = "stateful"
    deal: Deal | None = None

    def __init__(self, loader: Any) -> None:
        self.progress = Progress()
        self.dealer: Dealer | str = (
            f"a {type(loader).__qualname__} keeps its position itself, in a form that nobody can "
            f"deal over other ranks; use a torch DataLoader, and {INSTEAD}"
        )
        self._loader = loader
        self._rng_before: dict[str, Any] | None = None
        self._latest: Any = None
        self._begun = False

    def start(self) -> Iterator[Any]:
        """Begin a pass as the object itself would."""
        self.progress = Progress()
        self._rng_before = main_rng()
        return self._iterate()

    def resume(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Go on with the saved pass, as the object's own load_state_dict does."""
        self._rng_before = saved["rng_before"]
        if self._rng_before is not None:
            set_main_rng(self._rng_before)
        return self._iterate()

    def abandon(self) -> None:
        """A pass was left in its middle."""
        self.finish()
        self.progress = Progress()

    def finish(self) -> None:
        """A pass is over."""
        self._rng_before = None

    def state(self, in_pass: bool) -> dict[str, Any]:
        """Return the object's own state; None before its first pass, as asking may draw."""
        return {
            "position": self.progress.position,
            "rng_before": self._rng_before if in_pass else None,
            "own": self._loader.state_dict() if self._begun else None,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Hand the object its own state back."""
        self.shutdown()
        self.progress = Progress(saved["position"], saved["samples"])
        if saved["own"] is not None:
            streams.load(self._loader, saved["own"])

    def put_back_last(self, saved: dict[str, Any]) -> None:
        """Nothing: what the loader keeps of its data is its own."""

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

    def _iterate(self) -> Iterator[Any]:
        context = getattr(self._loader, "multiprocessing_context", None) or torch.multiprocessing
        if getattr(self._loader, "num_workers", 0):
            with shielded(context.get_start_method()):
                iterator = iter(self._loader)
            adopt(iterator)
        else:
            iterator = iter(self._loader)
        self._begun = True
        self._latest = iterator
        return self._counted(iterator)

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        progress, size = self.progress, getattr(self._loader, "batch_size", None) or 1
        for batch in iterator:
            progress.position += 1
            progress.samples += size  # its index lists are out of sight
            yield batch
