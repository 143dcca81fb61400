"""The source: from `RUN[@SNAPSHOT]` to one snapshot that is read without resuming it.

Without `@SNAPSHOT`, and with `@latest`, it is the newest usable one; by name also one that a
resume would not take. Nothing is claimed and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import NothingToResume, UnusableSnapshot
from trainckpt.format.names import split_target
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.places.not_a_run import no_run_at
from trainckpt.snapshot import attempts, catalog

if TYPE_CHECKING:
    from trainckpt.format.manifest import Manifest
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.tiers.base import Tier

LATEST = "latest"


@dataclass(frozen=True)
class Source:
    """One committed snapshot, and the place it lies in."""

    tier: Tier
    manifest: Manifest

    def __str__(self) -> str:
        return f"{self.tier.url}@{self.manifest.name}"


def open_source(target: str) -> Source:
    """The snapshot that `RUN[@SNAPSHOT]` names.

    Raises:
        NothingToResume: there is no such run, or it has committed nothing.
        UnusableSnapshot: there is no such snapshot, or its manifest is damaged.
        ConfigurationError, TierUnavailable: the place cannot be opened.
    """
    run, wanted = split_target(target)
    tier = place.open_other_place(run)
    candidate = choose(tier, wanted)
    if candidate.manifest is None:
        raise UnusableSnapshot(
            f"{candidate.name}: {candidate.reason}",
            hint=f"trainckpt list {tier.url}, and name another",
        )
    return Source(tier, candidate.manifest)


def read_candidates(tier: Tier) -> tuple[Candidate, ...]:
    """The catalog of the run at `tier`; `NothingToResume` if there is no run."""
    run = attempts.run_id(tier)
    if run is None:
        raise no_run_at(tier)
    return catalog.read_catalog(tier, run, attempts.read_attempts(tier))


def choose(tier: Tier, wanted: str | None) -> Candidate:
    """The candidate called `wanted`, or the newest usable one; errors as `open_source`."""
    candidates = read_candidates(tier)
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
