"""Tables of tensors: what each rank tells rank 0 of its tensors, merged into the manifest's. Pure.

Ranks that train the same part of a model have the same table, so few are told and read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed
from trainckpt.format.layout import Layout
from trainckpt.format.manifest import RANK, SPLIT, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WHAT = "a table of tensors"


def table_to_json(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """As it travels between ranks."""
    used = (entry.layout for entry in entries.values() if entry.layout)
    layouts = {layout: number for number, layout in enumerate(dict.fromkeys(used))}
    return {
        "layouts": [layout.to_json() for layout in layouts],
        "tensors": {
            name: [entry.dtype, list(entry.shape), layouts[entry.layout] if entry.layout else -1]
            for name, entry in entries.items()
        },
    }


def table_from_json(data: Any, world: int) -> dict[str, TensorEntry]:
    """The inverse of `table_to_json`."""
    layouts = [Layout.from_json(each, world, WHAT) for each in data["layouts"]]
    return {
        name: TensorEntry(dtype, tuple(shape), SPLIT, layouts[at])
        if at >= 0
        else TensorEntry(dtype, tuple(shape), RANK)
        for name, (dtype, shape, at) in data["tensors"].items()
    }


def merge_tables(tables: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """All tensors of all ranks; of a rank's own tensors the lowest rank's shape is told.

    Raises:
        SaveFailed: a tensor lies over the ranks in two ways at once.
    """
    merged: dict[str, TensorEntry] = dict(tables[0]) if tables else {}
    for table in tables[1:]:
        for name, entry in table.items():
            known = merged.setdefault(name, entry)
            if known.layout != entry.layout or (entry.layout and known != entry):
                raise SaveFailed(
                    f"{name[:100]} lies in one way on some ranks, in another on others",
                    hint="make all device meshes of a run parts of one `init_device_mesh`",
                )
    return merged


def check_whole(
    merged: Mapping[str, TensorEntry], tables: Iterable[tuple[Mapping[str, TensorEntry], list[int]]]
) -> None:
    """Refuse tensors of which a rank that should hold a part knows nothing.

    Args:
        merged: All tensors of all ranks.
        tables: Each with the ranks that told it.

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
                        f"rank {rank} has no part of {name[:100]}, which others divide with it",
                        hint="give every rank the same parameters and optimizer state",
                    )
