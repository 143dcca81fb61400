"""Hooks of the script: `on_resume`, `before_dump`, `after_restore`.

on_resume       state was applied: (cursor, lost)
before_dump     the processes are about to be dumped: close connections to the outside
after_restore   they were restored, as another attempt: connect again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.cursor import Cursor

    ResumeHook = Callable[[Cursor, "int | None"], object]
    AnyResumeHook = TypeVar("AnyResumeHook", bound=ResumeHook)
    AnyHook = TypeVar("AnyHook", bound=Callable[[], object])


class HookFailed(Exception):
    """A hook of the script raised; the text names the hook and its error."""


class Hooks:
    """The functions that a script has registered, each list in its order."""

    def __init__(self) -> None:
        self.on_resume: list[ResumeHook] = []
        self.before_dump: list[Callable[[], object]] = []
        self.after_restore: list[Callable[[], object]] = []
        self._resumed: tuple[Cursor, int | None] | None = None

    def add_on_resume(self, hook: ResumeHook) -> None:
        """Register a function; called at once if the run has resumed already."""
        self.on_resume.append(hook)
        if self._resumed is not None:
            hook(*self._resumed)

    def resumed(self, cursor: Cursor, lost: int | None) -> None:
        """Call the hooks after state was applied.

        `lost` counts the micro-batches that earlier attempts trained after the snapshot, and that
        are trained again; None if unknown. A run that begins at step 0 calls no hook.
        """
        self._resumed = (cursor, lost)
        for hook in self.on_resume:
            hook(cursor, lost)

    def call_before_dump(self) -> None:
        """Call the hooks before a dump. Raises `HookFailed`."""
        _call("before_dump", self.before_dump)

    def call_after_restore(self) -> None:
        """Call the hooks after a restore. Raises `HookFailed`."""
        _call("after_restore", self.after_restore)


def _call(kind: str, hooks: list[Any]) -> None:
    for hook in hooks:
        name = getattr(hook, "__qualname__", repr(hook))
        try:
            hook()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            raise HookFailed(f"the {kind} hook {name} raised {text}") from error
