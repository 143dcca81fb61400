"""What the script wants to be told: `on_resume`, `before_dump`, `after_restore`.

on_resume       state was applied: (cursor, lost)
before_dump     the processes are about to be dumped: close what is connected to the outside
after_restore   they have come back, as another attempt: connect again
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
    """A hook of the script's raised; the text says which, and what."""


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
        """State was applied: call all.

        `lost` counts the micro-batches that earlier attempts trained after the snapshot, and that
        are trained again; None if nobody knows. A run that begins at step 0 calls nobody.
        """
        self._resumed = (cursor, lost)
        for hook in self.on_resume:
            hook(cursor, lost)

    def close_outside(self) -> None:
        """The processes are about to be dumped. Raises `HookFailed`."""
        _call("before_dump", self.before_dump)

    def open_again(self) -> None:
        """They have come back. Raises `HookFailed`."""
        _call("after_restore", self.after_restore)


class Hooked:
    """The public decorators of a Checkpointer."""

    _hooks: Hooks

    def on_resume(self, hook: AnyResumeHook) -> AnyResumeHook:
        """Decorator: call `hook(cursor, lost)` once state was applied, if a snapshot was resumed.

        `lost` micro-batches were trained after it and are trained again; None if unknown.
        """
        self._hooks.add_on_resume(hook)
        return hook

    def before_dump(self, hook: AnyHook) -> AnyHook:
        """Decorator: call `hook()` at the boundary where the processes are about to be dumped.

        Close there what is connected to the outside: such connections cannot be dumped. Every rank
        calls its own, after the snapshot was committed. If one raises there is no dump, and the
        ranks stop with the snapshot.
        """
        self._hooks.before_dump.append(hook)
        return hook

    def after_restore(self, hook: AnyHook) -> AnyHook:
        """Decorator: call `hook()` once the dumped processes run again, before they train on.

        Open there what `before_dump` closed. If one raises the processes end, and `trainckpt
        resume` launches the command again from the snapshot.
        """
        self._hooks.after_restore.append(hook)
        return hook


def _call(kind: str, hooks: list[Any]) -> None:
    for hook in hooks:
        name = getattr(hook, "__qualname__", repr(hook))
        try:
            hook()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:300]
            raise HookFailed(f"the {kind} hook {name} raised {said}") from error
