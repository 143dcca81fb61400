"""Capture the positions of experiment trackers: which run of the tracker, and how far it is.

`attempt.tracked_runs` has the trackers, and what a resume does with a position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved

PART = "tracked runs"  # no keyword can be spelled so


class TrackedRun(Protocol):
    """One tracker's run, as the script logs to it.

    Attributes:
        run: The script's writer or run.
    """

    run: Any

    @property
    def id(self) -> str:
        """Return the tracker's own name for the run."""

    def position(self) -> Any:
        """Return what was logged by now, in plain values. At a boundary, training thread."""


def position_of(run: TrackedRun) -> dict[str, Any]:
    """Return the id of a run and the position in it."""
    return {"id": run.id, "position": run.position()}


def capture(out: Captured, runs: dict[str, TrackedRun]) -> None:
    """Add the position of every tracked run."""
    if runs:
        found = {name: position_of(run) for name, run in runs.items()}
        out.values[PART] = out.encode(found, PART)


def positions(saved: Saved) -> dict[str, dict[str, Any]]:
    """Return name -> id and position, for all runs in the snapshot."""
    tree = saved.values.get(PART)
    return dict(saved.decode(tree)) if tree is not None else {}
