"""Capture the positions of experiment trackers: which run of the tracker, and how far it is.

`attempt.tracked_runs` has the trackers, and what a resume does with a position.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved

PART = "tracked runs"  # no keyword can be spelled so


class TrackedRun(Protocol):
    """One tracker's run, as the script logs to it.

    Attributes:
        run: The script's writer or run.
        place: URL of the run directory; a copy of it has another one.
    """

    run: Any
    place: str

    @property
    def id(self) -> str:
        """Return the tracker's own name for the run."""

    def position(self) -> Any:
        """Return what was logged by now, in plain values. At a boundary, training thread."""


def position_of(run: TrackedRun) -> dict[str, Any]:
    """Return the id of a run, the position in it, and the run directory."""
    return {"id": run.id, "position": run.position(), "place": run.place}


def capture(out: Captured, runs: dict[str, TrackedRun]) -> None:
    """Add the position of every tracked run. A tracker's own trouble fails no save."""
    found = {}
    for name, run in runs.items():
        try:
            found[name] = position_of(run)
        except Exception as error:  # noqa: BLE001 - each tracker has errors of its own
            warnings.warn(f"a resume may repeat steps in {name}: {error!r}", stacklevel=2)
    if found:
        out.values[PART] = out.encode(found, PART)


def positions(saved: Saved) -> dict[str, dict[str, Any]]:
    """Return name -> `position_of`, for all runs in the snapshot."""
    tree = saved.values.get(PART)
    return dict(saved.decode(tree)) if tree is not None else {}
