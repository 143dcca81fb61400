"""show: show one checkpoint: tensors, cursor and origin."""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.options import read_options
from trainckpt.cli import list_, output
from trainckpt.errors import ConfigurationError, TrainckptError, UnusableSnapshot
from trainckpt.format.changes import RECORDED_CHANGES, Change
from trainckpt.format.names import SNAPSHOTS, split_target
from trainckpt.format.shard_file import ITEM_BYTES
from trainckpt.run_directory import run_tiers, run_url
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.decrypting_tier import DecryptingTier, KeyRing
from trainckpt.snapshot.restore import Reader

if TYPE_CHECKING:
    import argparse

    from trainckpt.format.manifest import FileEntry, Manifest, TensorEntry
    from trainckpt.format.shard_file import Region
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import Tier

    Shards = dict[str, list[tuple[str, Region]]]

PLACEMENTS = {"split": "one copy", "rank": "each rank's own"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: the latest snapshot")


def execute(arguments: argparse.Namespace) -> int:
    """Print one snapshot: reads its manifest and the headers of its files, not the data."""
    run, snapshot = split_target(arguments.target)
    tier = run_url.open_run_tier(run)
    candidate = run_tiers.choose(tier, snapshot, run_tiers.read_candidates(tier))
    manifest = candidate.manifest
    if manifest is None:
        raise candidate.refusal(tier.url)
    shards, unread = _shards(tier, manifest)
    tensors = [
        _tensor(name, entry, shards.get(name, [])) for name, entry in manifest.tensors.items()
    ]
    changes = _changes(tier, manifest)
    if arguments.json:
        output.document(
            {
                "run": tier.url,
                **list_.to_json(candidate),
                "cursor": manifest.cursor.to_json(),
                "parent": manifest.parent,
                "writer": manifest.writer,
                "fingerprint": manifest.fingerprint,
                "files": [_file_to_json(file) for file in manifest.files],
                "refers_to": [_file_to_json(file) for file in manifest.reached],
                "tensors": tensors,
                "unread": unread,
                "changes": changes,
            }
        )
        return 0
    _print_facts(tier, candidate, manifest)
    if changes:
        output.table(
            ("kind", "name", "snapshot", "script", "used"),
            [tuple(change.values()) for change in changes],
            title="the script had changed when this attempt resumed",
        )
    output.table(
        ("tensor", "type", "shape", "stored", "placement", "files"),
        [_row(tensor, manifest.world) for tensor in tensors],
    )
    total = sum(t["bytes"] for t in tensors)
    print(f"{len(tensors)} tensors, {output.size(total)} stored")
    for reason in unread:
        print(f"not read: {reason}")
    return 0


def _changes(tier: Tier, manifest: Manifest) -> list[dict[str, str]]:
    """Return the differences that the snapshot's attempt found when it resumed."""
    with suppress(TrainckptError):
        record = attempt_history.read_attempt(tier, manifest.name.attempt)
        found = record.facts.get(RECORDED_CHANGES) if record is not None else None
        return [Change.from_json(each).to_json() for each in found or () if isinstance(each, dict)]
    return []


def _shards(tier: Tier, manifest: Manifest) -> tuple[Shards, list[str]]:
    """Tensor -> its regions with the file that holds each; and why a file could not be read."""
    shards: Shards = {}
    opened = DecryptingTier(tier, KeyRing(read_options({}).identity))
    try:
        reader = Reader(opened, opened.admit(manifest))
    except (UnusableSnapshot, ConfigurationError) as error:
        return {}, [error.message]
    unread, folder_prefix = list[str](), f"{manifest.name.folder}/"
    for rank in range(manifest.world):
        try:
            locations = reader.places(rank)
        except UnusableSnapshot as error:
            unread.append(error.message)
            continue
        for location in locations:
            file = location.key.removeprefix(folder_prefix).removeprefix(f"{SNAPSHOTS}/")
            shards.setdefault(location.region.tensor, []).append((file, location.region))
    return shards, unread


def _tensor(name: str, entry: TensorEntry, shards: list[tuple[str, Region]]) -> dict[str, Any]:
    """One tensor as JSON. Its bytes are those of all shards, or of its shape if none was read."""
    true_dtype = next((region.true_dtype for _, region in shards if region.true_dtype), entry.dtype)
    full_bytes = prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
    return {
        "name": name,
        "dtype": true_dtype,
        "shape": list(entry.shape),
        "placement": entry.placement,
        "bytes": sum(region.num_bytes for _, region in shards) or full_bytes,
        "shards": [
            {
                "file": file,
                "offset": list(region.offset),
                "shape": list(region.shape),
                "bytes": region.num_bytes,
            }
            for file, region in shards
        ],
    }


def _file_to_json(file: FileEntry) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.num_bytes,
        "digest": file.digest or None,
        "header": file.header_digest,
    }


def _print_facts(tier: Tier, candidate: Candidate, manifest: Manifest) -> None:
    cursor = manifest.cursor
    trained_text = f"{cursor.micro_batches} micro-batches and {cursor.samples} samples by rank 0"
    rows = [
        ("snapshot", f"{manifest.name} in {tier.url}"),
        ("usable", "yes" if candidate.usable else f"no: {candidate.reason}"),
        ("cursor", str(cursor)),
        ("trained", f"{trained_text}, {cursor.batches} batches of this epoch"),
        ("attempt", f"{manifest.name.attempt}, begun from {manifest.parent or 'step 0'}"),
        ("created", output.when(manifest.created)),
        ("saved because", manifest.reason),
        ("not bitwise", "; ".join(manifest.not_bitwise)),
        ("tags", " ".join(manifest.tags)),
        ("ranks", str(manifest.world)),
        ("size", list_.size(manifest)),
        ("refers to", ", ".join(file.name for file in manifest.reached[:8])),
        ("written by", manifest.writer or "not recorded"),
        *[(key, str(value)) for key, value in manifest.fingerprint.items() if key != "world"],
    ]
    output.table(("what", "is"), [row for row in rows if row[1]])


def _row(tensor: dict[str, Any], world: int) -> tuple[str, ...]:
    holders = sorted({shard["file"] for shard in tensor["shards"]})
    holder_text = holders[0] if len(holders) == 1 else f"{len(holders)} of {world}"
    return (
        tensor["name"],
        tensor["dtype"],
        " x ".join(map(str, tensor["shape"])) or "scalar",
        output.size(tensor["bytes"]),
        PLACEMENTS.get(tensor["placement"], tensor["placement"]),
        holder_text if holders else "not read",
    )
