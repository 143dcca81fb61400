"""list: which checkpoints (snapshots) a run has, and why others are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.cli import show
from trainckpt.errors import NothingToResume
from trainckpt.lifecycle import place
from trainckpt.snapshot import attempts, catalog

if TYPE_CHECKING:
    import argparse

    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.tiers.base import Tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN")


def execute(arguments: argparse.Namespace) -> int:
    """Print the candidates, newest first."""
    tier = place.open_place(arguments.run)
    candidates = read(tier)
    if arguments.json:
        rows = [to_json(c, tier.name) for c in candidates]
        show.document({"run": tier.url, "candidates": rows})
        return 0
    if not candidates:
        print(f"{tier.url}: no snapshot was committed yet")
        return 0
    show.table(
        ("id", "name", "step", "micro", "when", "size", "ranks", "tags", "usable"),
        [_row(c) for c in candidates],
        title=tier.url,
    )
    return 0


def read(tier: Tier) -> tuple[Candidate, ...]:
    """The catalog of the run at `tier`; `NothingToResume` if there is no run."""
    run = attempts.run_id(tier)
    if run is None:
        raise NothingToResume(f"there is no run at {tier.url}", hint="check the path")
    return catalog.read_catalog(tier, run, attempts.read_attempts(tier))


def to_json(candidate: Candidate, tier: str) -> dict[str, Any]:
    """One candidate as the command line's JSON has it."""
    manifest, name = candidate.manifest, candidate.name
    return {
        "id": name.id,
        "name": str(name),
        "kind": manifest.kind if manifest else None,
        "attempt": name.attempt,
        "sequence": name.sequence,
        "epoch": manifest.cursor.epoch if manifest else None,
        "step": name.step,
        "micro": name.micro,
        "world": manifest.world if manifest else None,
        "bytes": manifest.num_bytes if manifest else None,
        "created": manifest.created if manifest else None,
        "tags": list(manifest.tags) if manifest else [],
        "tiers": [tier] if manifest else [],
        "usable": candidate.usable,
        "reason": candidate.reason,
        "saved_because": manifest.reason if manifest else None,
    }


def _row(candidate: Candidate) -> tuple[str, ...]:
    name, manifest = candidate.name, candidate.manifest
    facts = ("?", "?", "?", "")
    if manifest is not None:
        facts = (show.when(manifest.created), show.size(manifest.num_bytes), str(manifest.world),
                 " ".join(manifest.tags))  # fmt: skip
    usable = "yes" if candidate.usable else f"no: {candidate.reason}"
    return (name.id, str(name), str(name.step), str(name.micro), *facts, usable)
