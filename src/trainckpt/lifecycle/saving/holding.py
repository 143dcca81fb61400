"""What one rank's host holds of a snapshot in memory, by the plan of who keeps what: pure.

Slots are the pairs of arenas in which it is made (`tiers/kept.py`); names are those of a snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format import parity_file
from trainckpt.format.names import sealed_file_name, shard_file_name
from trainckpt.format.parity_file import HEAD_BYTES
from trainckpt.tiers.kept import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.manifest import Manifest
    from trainckpt.snapshot.redundancy import CodedSet, Plan


def sets_of(plan: Plan, rank: int) -> list[tuple[int, CodedSet]]:
    """The sets that a rank is in, with their numbers."""
    return [(number, coded) for number, coded in enumerate(plan.sets) if rank in coded.members]


def slots(plan: Plan, rank: int, manifest: Manifest) -> dict[str, int]:
    """What a rank keeps for others: the slot's name -> bytes."""
    found = {copy_slot(owner): manifest.files[owner].num_bytes for owner in plan.kept_by(rank)}
    for number, coded in sets_of(plan, rank):
        chunk_bytes = coded.chunk_bytes(max(sizes(coded, manifest)))
        found[parity_slot(number)] = HEAD_BYTES + coded.num_parity * chunk_bytes
    return found


def names(plan: Plan, rank: int, manifest: Manifest) -> set[str]:
    """Files that its host is to hold because of a rank: its own, what it keeps, the manifest."""
    called = file_name(manifest)
    found = {called(number) for number in (rank, *plan.kept_by(rank))}
    for number, coded in sets_of(plan, rank):
        found.add(parity_file.file_name(number, coded.members.index(rank)))
    return found | {MANIFEST}


def file_name(manifest: Manifest) -> Callable[[int], str]:
    """How a rank's file, as it is stored, is called in memory."""
    return sealed_file_name if manifest.encryption is not None else shard_file_name


def sizes(coded: CodedSet, manifest: Manifest) -> list[int]:
    """Bytes of each member's file; 0 of those who only help."""
    return [
        manifest.files[rank].num_bytes if place < coded.num_own else 0
        for place, rank in enumerate(coded.members)
    ]


def copy_slot(owner: int) -> str:
    """Of the copy of a rank's file."""
    return f"copy{owner:05d}"


def parity_slot(number: int) -> str:
    """Of the parities of a set."""
    return f"parity{number:05d}"
