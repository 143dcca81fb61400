"""Plan an export: each tensor's file and its name there. Pure.

By default a model's parameters and persistent buffers, under the names in its `state_dict`, so
without the model's own name; with `everything` all tensors under their full names. A tensor with
several names is written once, under the first of them; the other names stand in the file's
metadata, as `safetensors.torch.save_model` writes them. With `copies` each has its own copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.format.globs import select
from trainckpt.format.shard_file import ITEM_BYTES
from trainckpt.inspect.contents import models_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.inspect.contents import Contents

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
SIZES = {**ITEM_BYTES, "C64": 8}
BYTES, COMPLEX = "uint8", "complex64"  # stored as bytes in our files, and known to safetensors


@dataclass(frozen=True)
class ExportItem:
    """One tensor of an exported file.

    Attributes:
        name: Name in the file.
        source: Name in the snapshot.
        rank: Owning rank, if each rank has its own.
        dtype: safetensors type as written.
        shape: Shape of the whole tensor.
        kind: torch's type of a tensor written as bytes because safetensors has none for it; else
            "".
    """

    name: str
    source: str
    rank: int
    dtype: str
    shape: tuple[int, ...]
    kind: str = ""

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the file."""
        return prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class ExportSpec:
    """Specification of an export.

    Attributes:
        globs: Tensors, see `format.globs`; none: all.
        everything: Include tensors outside models, under full names.
        copies: Write every tied name with a copy of its own.
        dtype: safetensors type for all floating point tensors; "" as they are.
    """

    globs: tuple[str, ...] = ()
    everything: bool = False
    copies: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class ExportPlan:
    """Contents of an export.

    Attributes:
        items: Sorted by name.
        tied: Omitted name -> name of its tensor.
        notes: Facts for the reader of the files, one sentence each.
    """

    items: tuple[ExportItem, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def plan_export(contents: Contents, wish: ExportSpec) -> ExportPlan:
    """Decide the contents of an export.

    Raises:
        ConfigurationError: several models and no choice, a glob without a match, or a type that
            safetensors does not have.
    """
    values = contents.values()
    models = models_in(values)
    names = _all_names(contents, values, models, wish)
    chosen = select(wish.globs, names, models) if wish.globs else set(names)
    owners = sorted({name.partition("/")[0] for name in chosen})
    if not wish.everything and len(owners) != 1:
        raise ConfigurationError(
            f"{contents.source} holds {_models(models, owners)}",
            hint="choose one of them with --tensors 'NAME/*', or take everything with --all",
        )
    prefix = "" if wish.everything else f"{owners[0]}/"
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    items = []
    for name in sorted(chosen, key=lambda name: (names[name] != name, name)):
        short = name.removeprefix(prefix)
        kept = first.setdefault(names[name], short)
        if kept != short and not wish.copies:
            tied[short] = kept
        else:
            items += _items(contents, short, names[name], wish)
    items.sort(key=lambda item: item.name)
    return ExportPlan(tuple(items), tied, tuple(_notes(contents, values, items, owners, wish)))


def split(items: Sequence[ExportItem], most_bytes: int) -> list[list[ExportItem]]:
    """Split into files of at most so many bytes, in order; a larger tensor has a file of its
    own."""
    files: list[list[ExportItem]] = [[]]
    size = 0
    for item in items:
        if files[-1] and size + item.num_bytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.num_bytes
    return files


def _all_names(
    contents: Contents, values: Mapping[str, Any], models: Sequence[str], wish: ExportSpec
) -> dict[str, str]:
    """Return full name for the export -> tensor of the snapshot."""
    names = {name: name for name in contents.names}
    if not wish.everything:
        names = {name: name for name in names if name.partition("/")[0] in models}
    transient = set()
    for model in models:
        tree = values[model]
        for tied in (tree["tied"], tree.get("tied buffers", {})):
            for other, name in tied.items():
                if f"{model}/{name}" in names:
                    names[f"{model}/{other}"] = f"{model}/{name}"
        transient |= {f"{model}/{path}" for path in tree.get("transient", ())}
    if wish.everything:
        return names
    return {name: source for name, source in names.items() if name not in transient}


def _items(contents: Contents, name: str, source: str, wish: ExportSpec) -> list[ExportItem]:
    """Return one item; with everything, one for each rank with its own: `name`, `name@rank1`,
    ..."""
    entry = contents.manifest.tensors[source]
    owners = contents.owners(source) if wish.everything else {}
    found = []
    for rank, held in (owners or {0: entry.shape}).items():
        dtype, shape, kind = entry.dtype, held, ""
        if dtype == "U8":
            dtype, shape, kind = _true_type(contents, source, rank, held)
        if kind and not wish.everything:
            raise ConfigurationError(
                f"{source} is {kind}, a type that safetensors does not have",
                hint="leave it out with --tensors, or take its bytes with --all",
            )
        dtype = wish.dtype if wish.dtype and dtype in FLOATS else dtype
        short = f"{name}@rank{rank}" if rank else name
        found.append(
            ExportItem(name=short, source=source, rank=rank, dtype=dtype, shape=shape, kind=kind)
        )
    return found


def _true_type(
    contents: Contents, source: str, rank: int, stored: tuple[int, ...]
) -> tuple[str, tuple[int, ...], str]:
    """Read the true type of a tensor stored as bytes, which stands with the bytes.

    Returns:
        Type and shape as written, and the true type if safetensors has none for it, or "".
    """
    tensor = contents.read(source, rank)
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind == COMPLEX:
        return "C64", tuple(tensor.shape), ""
    return "U8", stored, "" if kind == BYTES else kind


def _models(models: Sequence[str], owners: Sequence[str]) -> str:
    listed = ", ".join(owners or models)
    return f"{len(owners)} models: {listed}" if owners else "no model's tensors"


def _notes(
    contents: Contents,
    values: Mapping[str, Any],
    items: Sequence[ExportItem],
    owners: Sequence[str],
    wish: ExportSpec,
) -> list[str]:
    found = []
    own = [i.name for i in items if contents.manifest.tensors[i.source].layout is None]
    world = contents.manifest.world
    if own and world > 1 and not wish.everything:
        found.append(f"each of {world} ranks has its own, here is rank 0's: {_few(own)}")
    bare = [f"{item.name} ({item.kind})" for item in items if item.kind]
    if bare:
        found.append(f"as bytes, since safetensors has no such type: {_few(bare)}")
    for model in owners if not wish.everything else ():
        tree = values[model]
        if "transient" not in tree:
            found.append("an older snapshot: buffers that are not persistent are in it too")
        if tree["extra"]:
            extra = [f"{path}._extra_state" for path in tree["extra"]]
            found.append(f"not in it, since it may be no tensor: {_few(extra)}")
        if tree.get("excluded"):
            found.append(f"not in the snapshot, excluded: {_few(tree['excluded'])}")
    return found


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
