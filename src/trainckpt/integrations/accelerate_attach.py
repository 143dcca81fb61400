"""`attach`: a Checkpointer for all objects of an Accelerator.

Accelerate has no hook at a micro-batch; the boundary is where the loop asks `ckpt.loader(loader)`
for its next batch. Accelerate's own save_state and load_state are not touched.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from trainckpt.checkpointer import Checkpointer
from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError
from trainckpt.format.exactness import How, Restored
from trainckpt.integrations import accelerate_loader, accelerate_state
from trainckpt.integrations.compat import check

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
        accelerator: The Accelerator with the prepared objects.
        run: Run directory, visible to all hosts; by default that of `trainckpt run --run`.
        **keywords: Options (docs/options.md), and further objects to track, each under its name.

    Returns:
        A Checkpointer that has resumed. Take batches from `ckpt.loader(loader)`.

    Raises:
        ConfigurationError: An object cannot be saved or restored exactly; the message has the
            change to make.
        StateMismatch: The snapshot holds other objects.
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
    ckpt._loop_checks.knows_epoch = False  # the script has not seen the epoch
    return ckpt


class AttachedCheckpointer(Checkpointer):
    """A Checkpointer for the objects of an Accelerator."""

    def __init__(self, accelerator: Any, run: Any, keywords: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._prepared: list[tuple[Any, accelerate_loader.PreparedLoader]] = []
        tracked = accelerate_state.tracked_of(accelerator)
        self._remembered = accelerate_state.AcceleratorState(
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
        """True once the attempt has finished, stopped or failed."""
        return self._attempt is not None and self._attempt.shutdown.left

    def resume(self, mode: str | None = None) -> Cursor:
        """Resume from the newest usable snapshot, and track its loaders at once."""
        cursor = super().resume(mode)
        for shard in self._remembered.tracked_then:
            self.loader(shard)
        return cursor

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the numbers of the epochs left of `number`, from the current one; then close.

        A loop that is left early calls `ckpt.close()`, or stands in a `with` statement.
        """
        yield from super().epochs(number)
        self.close()

    def loader(self, loader: Iterable[Any]) -> TrackedLoader:
        """Return a loader with the batches of a prepared one and a boundary before each of them.

        Raises:
            ConfigurationError: The loader is not prepared, or its position cannot be saved; the
                message has the change to make.
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
        if self._first:  # all loaders to track are tracked by now
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
