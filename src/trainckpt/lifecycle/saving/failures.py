"""What a rank tells the others of a save that failed there, and what is raised of it on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed, TierUnavailable
from trainckpt.state.stage import TensorsChanged
from trainckpt.tiers.refusals import is_full

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def told(error: Exception, rank: int, place: str) -> dict[str, Any]:
    """The words of an error, and what to do about it.

    Args:
        error: Of this rank.
        rank: This one.
        place: Of the run, as a command takes it.
    """
    message = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
    changed = isinstance(error, TensorsChanged)
    return {"error": f"rank {rank}: {message}", "hint": _hint(error, place), "changed": changed}


def together(failed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the reports of ranks that failed: every error, and the first hint; most are alike."""
    return {
        "error": "; ".join(report["error"] for report in failed),
        "hint": next((report["hint"] for report in failed if report.get("hint")), ""),
        "changed": any(report.get("changed") for report in failed),
    }


def raised(verdict: Mapping[str, Any]) -> SaveFailed:
    """The error of every rank, once rank 0 has told them."""
    kind = TensorsChanged if verdict.get("changed") else SaveFailed
    return kind(str(verdict["error"]), hint=str(verdict.get("hint", "")))


def _hint(error: Exception, place: str) -> str:
    said = str(getattr(error, "hint", ""))
    if not is_full(error):
        return said
    # What else is full, a tracked file's disk or memory, may be elsewhere: no prune frees it.
    prune = f", e.g. by `trainckpt prune {place} --keep-last 1`"
    also = prune if isinstance(error, TierUnavailable) else ""
    return f"{said or 'free space there'}{also}, then start again; older snapshots stand"
