"""Replica layout: the files of a snapshot that one rank's host holds in memory, by the plan. Pure.

Slots are the arena pairs in which replicas are made (`storage/replica_slots.py`). Names are those
of a snapshot's files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format import parity_file
from trainckpt.format.names import sealed_file_name, shard_file_name
from trainckpt.format.parity_file import HEAD_BYTES
from trainckpt.storage.replica_slots import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.manifest import Manifest
    from trainckpt.snapshot.redundancy import CodedSet, RedundancyPlan


def sets_of(plan: RedundancyPlan, rank: int) -> list[tuple[int, CodedSet]]:
    """Return the parity sets of a rank, with their numbers."""
    return [(number, coded) for number, coded in enumerate(plan.sets) if rank in coded.members]


def slots(plan: RedundancyPlan, rank: int, manifest: Manifest) -> dict[str, int]:
    """Return the slots a rank fills for other ranks: slot name -> bytes."""
    bytes_by_slot = {
        copy_slot(owner): manifest.files[owner].num_bytes for owner in plan.kept_by(rank)
    }
    for number, coded in sets_of(plan, rank):
        chunk_bytes = coded.chunk_bytes(max(sizes(coded, manifest)))
        bytes_by_slot[parity_slot(number)] = HEAD_BYTES + coded.num_parity * chunk_bytes
    return bytes_by_slot


def names(plan: RedundancyPlan, rank: int, manifest: Manifest) -> set[str]:
    """Return the files a host holds because of a rank: its own, its replicas, the manifest."""
    name_of = file_name(manifest)
    files = {name_of(number) for number in (rank, *plan.kept_by(rank))}
    for number, coded in sets_of(plan, rank):
        files.add(parity_file.file_name(number, coded.members.index(rank)))
    return files | {MANIFEST}


def file_name(manifest: Manifest) -> Callable[[int], str]:
    """Return the function from a rank to the name of its stored file in memory."""
    return sealed_file_name if manifest.encryption is not None else shard_file_name


def sizes(coded: CodedSet, manifest: Manifest) -> list[int]:
    """Return the bytes of each member's file; 0 for members that only hold parities."""
    return [
        manifest.files[rank].num_bytes if place < coded.num_own else 0
        for place, rank in enumerate(coded.members)
    ]


def copy_slot(owner: int) -> str:
    """Return the slot name of the copy of a rank's file."""
    return f"copy{owner:05d}"


def parity_slot(number: int) -> str:
    """Return the slot name of a set's parities."""
    return f"parity{number:05d}"
