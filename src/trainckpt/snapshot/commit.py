"""Commit a snapshot: the one atomic act that makes it exist.

    1. shard files   every rank   in any order; nothing refers to them
    2. receipts      every rank   lengths and digests, after its file is on stable storage
    3. manifest      rank 0       written to a temporary name after all of 2, fsynced
    4. the commit    rank 0       the manifest is renamed into place, the folder fsynced

Older shard files that the new ones refer to were committed before; 3 checks them again. A crash
before 4 leaves garbage for `prune`, never half a snapshot; a crash after 4 loses nothing. Folders
carry attempt and sequence number, so no commit ever replaces another.

Each rank also reports a table of its tensors, which rank 0 merges into the manifest's. Ranks that
train the same part of a model have equal tables, so few are sent and parsed. Tables are pure.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed
from trainckpt.format import json_io, names
from trainckpt.format import manifest as manifests
from trainckpt.format.digest import digest
from trainckpt.format.layout import Layout
from trainckpt.format.manifest import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.storage.base import Tier


def commit(tier: Tier, manifest: Manifest) -> None:
    """Take steps 3 and 4. On return the snapshot exists and survives a power cut.

    Raises:
        SaveFailed: a shard file is missing or has another length; nothing was committed.
    """
    folder = manifest.name.folder
    older = ((names.SNAPSHOTS, file) for file in manifest.reached)
    for place, file in chain(((folder, file) for file in manifest.files), older):
        size = tier.size(f"{place}/{file.name}")
        if size != file.num_bytes:
            raise SaveFailed(f"{place}/{file.name} has {size} bytes, {file.num_bytes} were written")
    tier.replace(f"{folder}/{names.MANIFEST}", manifests.dump(manifest))


WHAT = "a table of tensors"


def table_name(entries: Mapping[str, TensorEntry]) -> str:
    """Return a name that is the same for equal tables."""
    layouts = manifests.number_layouts(entries)
    own = json_io.canonical([layout.to_json() for layout in layouts])
    return digest(own + manifests.spell_tensors(entries, layouts))


def table_to_json(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the table as JSON, to send between ranks."""
    layouts = manifests.number_layouts(entries)
    return {
        "layouts": [layout.to_json() for layout in layouts],
        "tensors": {
            name: [entry.dtype, list(entry.shape), layouts[entry.layout] if entry.layout else -1]
            for name, entry in entries.items()
        },
    }


def table_from_json(data: Any, world: int) -> dict[str, TensorEntry]:
    """Return the table from `table_to_json`."""
    layouts = [Layout.from_json(each, world, WHAT) for each in data["layouts"]]
    return {
        name: TensorEntry(dtype, tuple(shape), layouts[at])
        if at >= 0
        else TensorEntry(dtype, tuple(shape))
        for name, (dtype, shape, at) in data["tensors"].items()
    }


def merge_tables(tables: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Return all tensors of all ranks; of a rank's own tensors, with the lowest rank's shape.

    Raises:
        SaveFailed: a tensor has two layouts.
    """
    merged: dict[str, TensorEntry] = dict(tables[0]) if tables else {}
    for table in tables[1:]:
        for name, entry in table.items():
            known = merged.setdefault(name, entry)
            if known.layout != entry.layout or (entry.layout and known != entry):
                raise SaveFailed(
                    f"{name[:100]} has different layouts on different ranks",
                    hint="make all device meshes of a run parts of one `init_device_mesh`",
                )
    return merged


def check_whole(
    merged: Mapping[str, TensorEntry], tables: Iterable[tuple[Mapping[str, TensorEntry], list[int]]]
) -> None:
    """Refuse tensors missing on a rank of their layout.

    Args:
        merged: All tensors of all ranks.
        tables: Each with the ranks that reported it.

    Raises:
        SaveFailed: such a snapshot could never be read.
    """
    for table, ranks in tables:
        missing: dict[Layout, str] = {}
        for name, entry in merged.items():
            if entry.layout is not None and name not in table:
                missing.setdefault(entry.layout, name)
        for layout, name in missing.items():
            for rank in ranks:
                if layout.has(rank):
                    raise SaveFailed(
                        f"rank {rank} has no part of {name[:100]}, which is sharded over it",
                        hint="give every rank the same parameters and optimizer state",
                    )
