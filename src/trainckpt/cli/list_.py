"""list: list the checkpoints (snapshots) of a run, and why others are refused."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.options import LOCAL
from trainckpt.cli import output, tier_status
from trainckpt.cli.dumps import dumps_of
from trainckpt.format.attempt_record import ENDED, UNDECIDED
from trainckpt.format.attempt_times import seconds_of
from trainckpt.format.dump import KIND
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    import argparse

    from trainckpt.cli.dumps import Dump
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.manifest import Manifest
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import RunTier

ATTEMPT_COLUMNS = (
    "attempt",
    "began from",
    "ranks",
    "started",
    "how it is",
    "exit code",
    "newest commit",
)
DUMP_COLUMNS = ("id", "when", "size", "ranks", "host", "tiers", "usable")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument("--attempts", action="store_true", help="list the attempts too")


def execute(arguments: argparse.Namespace) -> int:
    """Print the candidates, newest first."""
    tier = run_url.open_run_tier(arguments.run)
    everywhere = open_everywhere(arguments.run)
    candidates, dumps = everywhere.candidates(), dumps_of(tier)
    tiers = tier_status.statuses(everywhere, candidates)
    if arguments.json:
        rows = [*map(to_json, candidates), *map(_dump_to_json, dumps)]
        rows.sort(key=lambda row: (row["attempt"], row["sequence"]), reverse=True)
        document: dict[str, Any] = {"run": tier.url, "candidates": rows}
        document |= {"attempts": _attempts(tier)} if arguments.attempts else {}
        document |= {"silent": dict(everywhere.silent)} if everywhere.silent else {}
        output.document({**document, "tiers": [asdict(status) for status in tiers]})
        return 0
    for name, reason in everywhere.silent.items():
        print(f"the tier {name} does not answer: {reason}", file=sys.stderr)
    if candidates:
        output.table(
            ("id", "name", "step", "micro", "when", "size", "ranks", "tiers", "tags", "usable"),
            [_row(c) for c in candidates],
            title=tier.url,
        )
    else:
        print(f"{tier.url}: no snapshot was committed yet")
    if len(tiers) > 1 or any(status.trouble for status in tiers):
        output.table(tier_status.COLUMNS, [status.row() for status in tiers], title="tiers")
    if dumps:
        output.table(DUMP_COLUMNS, [_dump_row(d) for d in dumps], title="process dumps")
    if arguments.attempts:
        output.table(ATTEMPT_COLUMNS, [_attempt_row(row) for row in _attempts(tier)])
    return 0


def to_json(candidate: Candidate) -> dict[str, Any]:
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
        "total_bytes": manifest.num_bytes + manifest.reached_bytes if manifest else None,
        "created": manifest.created if manifest else None,
        "tags": list(manifest.tags) if manifest else [],
        "tiers": list(candidate.tiers),
        "usable": candidate.usable,
        "reason": candidate.reason,
        "saved_because": manifest.reason if manifest else None,
        "not_bitwise": manifest.not_bitwise if manifest else [],
    }


def _dump_to_json(found: Dump) -> dict[str, Any]:
    """Return one dump as JSON; what only a snapshot has is null."""
    record, name = found.record, found.name
    row = {
        **dict.fromkeys(("epoch", "step", "micro", "world", "bytes", "created", "saved_because")),
        "id": str(name),
        "name": str(name),
        "kind": KIND,
        "attempt": name.attempt,
        "sequence": name.sequence,
        "tags": [],
        "tiers": [LOCAL],
        "usable": not found.reason,
        "reason": found.reason,
    }
    if record is not None:
        row |= {"world": record.world, "bytes": record.num_bytes, "created": record.created}
        row |= {"saved_because": record.reason, "total_bytes": record.num_bytes}
    return row


def _dump_row(found: Dump) -> tuple[str, ...]:
    usable_text = f"no: {found.reason}" if found.reason else "yes"
    if (record := found.record) is None:
        return (str(found.name), "?", "?", "?", "?", LOCAL, usable_text)
    return (
        str(found.name),
        output.when(record.created),
        output.size(record.num_bytes),
        str(record.world),
        record.host.name,
        LOCAL,
        usable_text,
    )


def size(manifest: Manifest) -> str:
    """Return its own bytes, and those of the older files it refers to."""
    older_text = f" + {output.size(manifest.reached_bytes)}" if manifest.reached else ""
    return f"{output.size(manifest.num_bytes)}{older_text}"


def _row(candidate: Candidate) -> tuple[str, ...]:
    name, manifest = candidate.name, candidate.manifest
    tiers = " ".join(candidate.tiers)
    facts: tuple[str, ...] = ("?", "?", "?", tiers, "")
    if manifest is not None:
        when, tags = output.when(manifest.created), " ".join(manifest.tags)
        facts = (when, size(manifest), str(manifest.world), tiers, tags)
    exactness = "yes, not bitwise" if manifest is not None and manifest.not_bitwise else "yes"
    usable_text = exactness if candidate.usable else f"no: {candidate.reason}"
    return (name.id, str(name), str(name.step), str(name.micro), *facts, usable_text)


def _attempts(tier: RunTier) -> list[dict[str, Any]]:
    """Return the attempts' records, newest first; for those without an outcome, the live ranks."""
    records = attempt_history.read_attempts(tier)
    return [_attempt(tier, records[number]) for number in sorted(records, reverse=True)]


def _attempt(tier: RunTier, record: AttemptRecord) -> dict[str, Any]:
    outcome = record.outcome or {}
    age = None if record.outcome else heartbeat.age_s(tier, record.attempt)
    return {
        "attempt": record.attempt,
        "parent": record.parent,
        "state": record.state,
        "alive": age is not None and age < heartbeat.ALIVE_S,
        "heartbeat_age_s": None if age is None else round(age, 1),
        "outcome": outcome.get("outcome"),
        "exit_code": outcome.get("exit_code"),
        "snapshot": outcome.get("snapshot"),
        "newest_commit": record.newest_commit,
        "world": record.facts.get("world"),
        "started": record.facts.get("started"),
        "reason": record.facts.get("damaged") or outcome.get("reason"),
    }


def _attempt_row(row: dict[str, Any]) -> tuple[str, ...]:
    start_text = {None: "step 0", UNDECIDED: "not chosen"}.get(row["parent"], row["parent"])
    started = seconds_of(row["started"])
    return (
        str(row["attempt"]),
        start_text,
        output.text(row["world"]),
        "" if started is None else output.when(started),
        _how(row),
        output.text(row["exit_code"]),
        row["newest_commit"] or "",
    )


def _how(row: dict[str, Any]) -> str:
    reason = f": {row['reason']}" if row["reason"] else ""
    if row["outcome"]:
        return f"{row['outcome']}{reason}"
    if row["alive"]:
        return f"alive, {row['state']}"
    if row["state"] == ENDED or reason:
        return f"{row['state']}{reason}"
    age = row["heartbeat_age_s"]
    return "dead, without a word" if age is None else f"dead, silent for {age:.0f} s"
