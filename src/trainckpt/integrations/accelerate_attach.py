"""`attach`: a Checkpointer for everything an Accelerator holds.

Accelerate has no hook at a micro-batch; the boundary is where the loop asks `ckpt.loader(loader)`
for its next batch. Accelerate's own save_state and load_state are not touched.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError
from trainckpt.format.exactness import How, Restored
from trainckpt.integrations import accelerate_loader, accelerate_state
from trainckpt.integrations.adapter import check
from trainckpt.lifecycle.checkpointer import Checkpointer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from trainckpt.format.cursor import Cursor

_attached: weakref.WeakKeyDictionary[Any, weakref.ref[AttachedCheckpointer]]
_attached = weakref.WeakKeyDictionary()


def attach(
    accelerator: Any, run: str | os.PathLike[str] | None = None, **keywords: Any
) -> AttachedCheckpointer:
    """Track everything prepared or registered, and resume. Call it after `accelerator.prepare`.

    Args:
        accelerator: The Accelerator that prepared the objects.
        run: Directory of the run, that all hosts see; None: what `trainckpt run --run` named.
        **keywords: Options (docs/options.md), and further objects to track under their own names.

    Returns:
        A Checkpointer that has resumed already. Take batches from `ckpt.loader(loader)`.

    Raises:
        ConfigurationError: something cannot be saved or restored exactly; says what to do.
        StateMismatch: the run's snapshot is of other objects.
    """
    relied = (*accelerate_state.RELIED, *accelerate_loader.RELIED)
    check("accelerate", relied)
    gone = accelerate_loader.missing_names()
    if gone:
        raise ConfigurationError(
            f"this accelerate is built in another way than trainckpt knows ({'; '.join(gone)})",
            hint="use a version of accelerate named in docs/versions.md",
        )
    accelerate_state.refuse_accelerator(accelerator)
    before = _attached.get(accelerator, lambda: None)()
    if before is not None and not before.has_ended:
        raise ConfigurationError(
            "this Accelerator is attached already, and each run is saved once",
            hint="keep the Checkpointer that the first attach returned",
        )
    ckpt = AttachedCheckpointer(accelerator, run, keywords)
    _attached[accelerator] = weakref.ref(ckpt)
    ckpt.resume()
    ckpt._slips.knows_epoch = False  # nobody was told
    return ckpt


class AttachedCheckpointer(Checkpointer):
    """A Checkpointer whose objects are an Accelerator's."""

    def __init__(self, accelerator: Any, run: Any, keywords: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._prepared: list[tuple[Any, accelerate_loader.PreparedLoader]] = []
        tracked = accelerate_state.tracked_of(accelerator)
        self._remembered = accelerate_state.Remembered(
            accelerator, lambda: [shard for shard, _ in self._prepared]
        )
        tracked["accelerator"] = self._remembered
        taken = sorted(tracked.keys() & keywords.keys())
        if taken:
            raise ConfigurationError(
                f"{', '.join(taken)}: attach tracks what was prepared under this name already",
                hint="leave it out, or choose another keyword for an object of your own",
            )
        self._known = accelerate_state.identities(accelerator)
        super().__init__(run, **tracked, **keywords)

    @property
    def has_ended(self) -> bool:
        """The attempt is over, in whatever way."""
        return self._attempt is not None and self._attempt.departure.left

    def resume(self, mode: str | None = None) -> Cursor:
        """Go on from the newest usable snapshot; the loaders it knows are tracked at once."""
        cursor = super().resume(mode)
        for shard in self._remembered.tracked_then:
            self.loader(shard)
        return cursor

    def epochs(self, number: int) -> Iterator[int]:
        """Count epochs up to `number`, from the one the run is in; then the run is finished.

        A loop that is left early ends the run with `ckpt.close()`, or by a `with` statement.
        """
        yield from super().epochs(number)
        self.close()

    def loader(self, loader: Iterable[Any]) -> TrackedLoader:
        """A drop-in for a prepared loader, with the boundary inside.

        Raises:
            ConfigurationError: not prepared, or its position cannot be kept; says what to do.
        """
        if isinstance(loader, TrackedLoader):
            return super().loader(loader)
        for shard, known in self._prepared:
            if loader is shard:
                return super().loader(known)
        self._must_be_prepared(loader)
        prepared = accelerate_loader.PreparedLoader(loader)
        self._prepared.append((loader, prepared))
        return super().loader(prepared)

    def _seldom(self, *, evaluation: bool, closing: bool) -> None:
        if self._first:  # whoever is tracked is so by now
            problems = self._remembered.problems(self._remembered.tracked_now())
            self._note([Restored("accelerator", How.NOT_KEPT, problem) for problem in problems])
        super()._seldom(evaluation=evaluation, closing=closing)

    def _must_be_prepared(self, loader: Any) -> None:
        accelerator = self._accelerator
        if not any(loader is one for one in accelerator._dataloaders):
            raise ConfigurationError(
                "this loader was not prepared by the Accelerator that is attached",
                hint="loader = accelerator.prepare(loader), then ckpt.loader(loader)",
            )
        if accelerate_state.identities(accelerator) - self._known:
            raise ConfigurationError(
                "something was prepared or registered after attach, and would not be saved",
                hint="call attach after the last accelerator.prepare and "
                "register_for_checkpointing",
            )
