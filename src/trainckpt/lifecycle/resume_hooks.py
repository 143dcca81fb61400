"""What the script wants to be told when a run goes on: `@ckpt.on_resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.cursor import Cursor

    Hook = Callable[[Cursor, "int | None"], object]
    AnyHook = TypeVar("AnyHook", bound=Hook)


class ResumeHooks:
    """Functions called with (cursor, lost) once state was applied.

    `lost` counts the micro-batches that earlier attempts trained after the snapshot, and that are
    trained again; None if nobody knows. A run that begins at step 0 calls nobody.
    """

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._resumed: tuple[Cursor, int | None] | None = None

    def add(self, hook: AnyHook) -> AnyHook:
        """Register a function; called at once if the run has resumed already. A decorator."""
        self._hooks.append(hook)
        if self._resumed is not None:
            hook(*self._resumed)
        return hook

    def resumed(self, cursor: Cursor, lost: int | None) -> None:
        """State was applied: call all, in the order they were registered."""
        self._resumed = (cursor, lost)
        for hook in self._hooks:
            hook(cursor, lost)
