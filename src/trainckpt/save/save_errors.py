"""Convert a rank's save error to a message for the others, and back to an exception on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed, TierUnavailable
from trainckpt.state.staging import TensorsChanged
from trainckpt.storage.store_errors import is_full

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def to_message(error: Exception, rank: int, place: str) -> dict[str, Any]:
    """Return the text of an error, and a hint what to do about it.

    Args:
        error: Raised on this rank.
        rank: This rank.
        place: Run directory, as a command takes it.
    """
    message = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
    changed = isinstance(error, TensorsChanged)
    return {"error": f"rank {rank}: {message}", "hint": _hint(error, place), "changed": changed}


def combine(failed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the reports of failed ranks: every error, and the first hint; most are alike."""
    return {
        "error": "; ".join(report["error"] for report in failed),
        "hint": next((report["hint"] for report in failed if report.get("hint")), ""),
        "changed": any(report.get("changed") for report in failed),
    }


def from_message(verdict: Mapping[str, Any]) -> SaveFailed:
    """Return the exception that every rank raises, from the verdict of rank 0."""
    kind = TensorsChanged if verdict.get("changed") else SaveFailed
    return kind(str(verdict["error"]), hint=str(verdict.get("hint", "")))


def _hint(error: Exception, place: str) -> str:
    own_hint = str(getattr(error, "hint", ""))
    if not is_full(error):
        return own_hint
    # A full tracked file's disk, or memory, may be elsewhere: no prune frees that.
    prune = f", e.g. by `trainckpt prune {place} --keep-last 1`"
    also = prune if isinstance(error, TierUnavailable) else ""
    return f"{own_hint or 'free space there'}{also}, then start again; older snapshots stand"
