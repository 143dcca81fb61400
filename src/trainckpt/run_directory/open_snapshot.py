"""Resolve `RUN[@SNAPSHOT]` to one snapshot that is read without resuming it.

Without `@SNAPSHOT`, and with `@latest`, it is the newest usable one. By name it may also be one
that a resume would refuse. Nothing is claimed and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import NothingToResume, UnusableSnapshot
from trainckpt.format.names import split_target
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_tiers import no_run_at
from trainckpt.snapshot import attempt_history, catalog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import Tier

LATEST = "latest"


@dataclass(frozen=True)
class SnapshotSource:
    """One committed snapshot, and its tier.

    Attributes:
        passed_over: Newer damaged ones with the reason, if the newest usable one was requested.
    """

    tier: Tier
    manifest: Manifest
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.tier.url}@{self.manifest.name}"


def open_source(target: str) -> SnapshotSource:
    """Open the snapshot named by `RUN[@SNAPSHOT]`.

    Raises:
        NothingToResume: there is no such run, or it has committed nothing.
        UnusableSnapshot: there is no such snapshot, or its manifest is damaged.
        ConfigurationError, TierUnavailable: the run directory cannot be opened.
    """
    run, wanted = split_target(target)
    tier = run_url.open_other_place(run)
    candidates = read_candidates(tier)
    candidate = choose(tier, wanted, candidates)
    if candidate.manifest is None:
        raise UnusableSnapshot(
            f"{candidate.name}: {candidate.reason}",
            hint=f"trainckpt list {tier.url}, and name another",
        )
    passed_over = _passed_over(candidates, candidate) if wanted in (None, LATEST) else ()
    return SnapshotSource(tier, candidate.manifest, passed_over)


def _passed_over(candidates: Sequence[Candidate], chosen: Candidate) -> tuple[str, ...]:
    newer = [c for c in candidates if c.name > chosen.name and not c.usable]
    harmless = (catalog.NOT_COMMITTED, catalog.ABANDONED)
    return tuple(f"{c.name} is passed over: {c.reason}" for c in newer if c.reason not in harmless)


def read_candidates(tier: Tier) -> tuple[Candidate, ...]:
    """Return the catalog of the run at `tier`; raise `NothingToResume` if there is no run."""
    run = attempt_history.run_id(tier)
    if run is None:
        raise no_run_at(tier)
    return catalog.read_catalog(tier, run, attempt_history.read_attempts(tier))


def choose(tier: Tier, wanted: str | None, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate called `wanted`, or the newest usable one; errors as `open_source`."""
    if all(c.reason == catalog.NOT_COMMITTED for c in candidates):
        raise NothingToResume(
            f"{tier.url}: no snapshot was committed yet",
            hint=f"trainckpt list --attempts {tier.url}",
        )
    if wanted in (None, LATEST) and not any(c.usable for c in candidates):
        why = "; ".join(f"{c.name}: {c.reason}" for c in candidates[:3])
        raise UnusableSnapshot(
            f"{tier.url} has no usable snapshot: {why}",
            hint=f"trainckpt list {tier.url}, and name one of them",
        )
    return catalog.find(candidates, wanted or LATEST, tier.url)
