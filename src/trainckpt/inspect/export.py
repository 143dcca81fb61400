"""Export one snapshot as safetensors files that other libraries load.

    OUT.safetensors    one file
    OUT/               model.safetensors; or model-00001-of-0000N.safetensors and so on, with
                       model.safetensors.index.json, as `transformers` reads them

One tensor at a time is in memory. Files are written under temporary names, synced and renamed at
the end, the index last: the files at OUT are always whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.globs import select
from trainckpt.format.shard_file import ITEM_BYTES
from trainckpt.inspect.contents import models_in, with_tied
from trainckpt.state.staging import bytes_of
from trainckpt.storage.local import TEMPORARY, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from trainckpt.inspect.contents import Contents


# ---- the plan of an export: each tensor's file and its name there
#
# By default a model's parameters and persistent buffers, under the names in its `state_dict`, so
# without the model's own name; with `everything` all tensors under their full names. A tensor with
# several names is written once, under the first of them; the other names stand in the file's
# metadata, as `safetensors.torch.save_model` writes them. With `copies` each has its own copy.


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


def plan_export(contents: Contents, spec: ExportSpec) -> ExportPlan:
    """Decide the contents of an export.

    Raises:
        ConfigurationError: several models and no choice, a glob without a match, or a type that
            safetensors does not have.
    """
    values = contents.values()
    names, chosen, owners = choose(contents, values, spec)
    prefix = "" if spec.everything else f"{owners[0]}/"
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    items = []
    for name in sorted(chosen, key=lambda name: (names[name] != name, name)):
        short = name.removeprefix(prefix)
        kept = first.setdefault(names[name], short)
        if kept != short and not spec.copies:
            tied[short] = kept
        else:
            items += _items(contents, short, names[name], spec)
    items.sort(key=lambda item: item.name)
    return ExportPlan(tuple(items), tied, tuple(_notes(contents, values, items, owners, spec)))


def choose(
    contents: Contents, values: Mapping[str, Any], spec: ExportSpec
) -> tuple[dict[str, str], set[str], list[str]]:
    """Return full name -> tensor of the snapshot, the chosen names, and their first parts.

    Raises:
        ConfigurationError: several models and no choice, or a glob without a match.
    """
    models = models_in(values)
    names = _all_names(contents, values, models, spec)
    chosen = select(spec.globs, names, models) if spec.globs else set(names)
    owners = sorted({name.partition("/")[0] for name in chosen})
    if not spec.everything and len(owners) != 1:
        count = f"{len(owners)} models: {', '.join(owners)}" if owners else "no model's tensors"
        raise ConfigurationError(
            f"{contents.source} holds {count}",
            hint="choose one of them with --tensors 'NAME/*', or take everything with --all",
        )
    return names, chosen, owners


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
    contents: Contents, values: Mapping[str, Any], models: Sequence[str], spec: ExportSpec
) -> dict[str, str]:
    """Return full name for the export -> tensor of the snapshot."""
    names = with_tied(contents.names, values)
    if spec.everything:
        return names
    transient = {
        f"{model}/{path}" for model in models for path in values[model].get("transient", ())
    }
    return {
        name: source
        for name, source in names.items()
        if name.partition("/")[0] in models and name not in transient
    }


def _items(contents: Contents, name: str, source: str, spec: ExportSpec) -> list[ExportItem]:
    """Return one item; with everything, one for each rank with its own: `name`, `name@rank1`,
    ..."""
    entry = contents.manifest.tensors[source]
    owners = contents.owners(source) if spec.everything else {}
    found = []
    for rank, held in (owners or {0: entry.shape}).items():
        dtype, shape, kind = entry.dtype, held, ""
        if dtype == "U8":
            dtype, shape, kind = _true_type(contents, source, rank, held)
        if kind and not spec.everything:
            raise ConfigurationError(
                f"{source} is {kind}, a type that safetensors does not have",
                hint="leave it out with --tensors, or take its bytes with --all",
            )
        dtype = spec.dtype if spec.dtype and dtype in FLOATS else dtype
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


def _notes(
    contents: Contents,
    values: Mapping[str, Any],
    items: Sequence[ExportItem],
    owners: Sequence[str],
    spec: ExportSpec,
) -> list[str]:
    found = []
    own = [i.name for i in items if contents.manifest.tensors[i.source].layout is None]
    world = contents.manifest.world
    if own and world > 1 and not spec.everything:
        found.append(f"each of {world} ranks has its own, here is rank 0's: {few(own)}")
    bare = [f"{item.name} ({item.kind})" for item in items if item.kind]
    if bare:
        found.append(f"as bytes, since safetensors has no such type: {few(bare)}")
    for model in owners if not spec.everything else ():
        tree = values[model]
        if "transient" not in tree:
            found.append("an older snapshot: buffers that are not persistent are in it too")
        if tree["extra"]:
            extra = [f"{path}._extra_state" for path in tree["extra"]]
            found.append(f"not in it, since it may be no tensor: {few(extra)}")
        if tree.get("excluded"):
            found.append(f"not in the snapshot, excluded: {few(tree['excluded'])}")
    return found


def few(names: Sequence[str]) -> str:
    """Return at most five names, and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


# ---- the export


SUFFIX = ".safetensors"
NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class ExportResult:
    """One file of an export."""

    path: Path
    num_bytes: int
    tensors: int


def check_out(out: Path, *, force: bool) -> None:
    """Refuse to overwrite existing files, unless `force`; `ConfigurationError`."""
    if is_one_file(out):
        there = [out] if out.exists() else []
    elif out.exists() and not out.is_dir():
        raise ConfigurationError(
            f"{out} is neither a folder nor a name that ends in {SUFFIX}", hint="choose another"
        )
    else:
        there = _of_an_export(out)
    if there and not force:
        raise ConfigurationError(
            f"{there[0]} exists already", hint="choose another place, or add --force"
        )


def is_one_file(out: Path) -> bool:
    """Return True if `out` names a file, and not a folder."""
    return out.suffix == SUFFIX


def export(
    contents: Contents,
    plan: ExportPlan,
    out: Path,
    *,
    most_bytes: int,
    force: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[ExportResult]:
    """Write the planned files.

    Args:
        contents: The snapshot.
        plan: From `plan_export`.
        out: A file that ends in `.safetensors`, or a folder.
        most_bytes: Bytes of tensors in one file of a folder, at most.
        force: Replace an existing export.
        progress: Called with the bytes of each tensor after it is written.

    Raises:
        ConfigurationError: a file exists there already.
        UnusableSnapshot: a byte read does not match its digest; nothing is left behind.
        TierUnavailable: a tier refused.
    """
    check_out(out, force=force)
    folder = out.parent if is_one_file(out) else out
    files = [list(plan.items)] if is_one_file(out) else split(plan.items, most_bytes)
    names = [out.name] if is_one_file(out) else _names(len(files))
    kinds = {f"{item.name}:type": item.kind for item in plan.items if item.kind}
    metadata = {**plan.tied, **kinds, "format": "pt", "trainckpt": str(contents.manifest.name)}
    with translated("write", out):
        folder.mkdir(parents=True, exist_ok=True)
        old = set() if is_one_file(out) else set(_of_an_export(out))
        temporary = [folder / f"{TEMPORARY}{secrets.token_hex(8)}" for _ in [*files, INDEX]]
        try:
            for path, items in zip(temporary, files, strict=False):
                _write(path, _blocks(contents, items, metadata, progress))
            if len(files) > 1:
                _write(temporary[-1], [memoryview(_index(files, names, metadata))])
                names = [*names, INDEX]
            _rename(folder, temporary, names, old)
        finally:
            for path in temporary:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
    return [
        ExportResult(folder / name, (folder / name).stat().st_size, len(items))
        for name, items in zip(names, files, strict=False)
    ]


def _rename(folder: Path, temporary: list[Path], names: list[str], old: set[Path]) -> None:
    """Put the files in place. No reader mixes old and new: the index is missing, or new."""
    if folder / INDEX in old:
        (folder / INDEX).unlink(missing_ok=True)
    for path, name in zip(temporary, names, strict=False):
        path.replace(folder / name)
    for path in old - {folder / name for name in names}:
        path.unlink(missing_ok=True)
    sync_folder(folder)


def _of_an_export(folder: Path) -> list[Path]:
    """Return the files of an earlier export; other files in the folder are left alone."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if path.name in (NAME, INDEX) or _PART.fullmatch(path.name)]


def _names(number: int) -> list[str]:
    if number == 1:
        return [NAME]
    return [f"model-{i:05d}-of-{number:05d}{SUFFIX}" for i in range(1, number + 1)]


def _index(
    files: Sequence[Sequence[ExportItem]], names: Sequence[str], metadata: dict[str, str]
) -> bytes:
    total = sum(item.num_bytes for items in files for item in items)
    where = {item.name: name for items, name in zip(files, names, strict=False) for item in items}
    body = {"metadata": {**metadata, "total_size": total}, "weight_map": where}
    return json.dumps(body, indent=2, sort_keys=True).encode() + b"\n"


def _blocks(
    contents: Contents,
    items: Sequence[ExportItem],
    metadata: dict[str, str],
    progress: Callable[[int], None],
) -> Iterator[memoryview]:
    """Yield the file's bytes, in order: larger item sizes first, so that each tensor is aligned."""
    ordered = sorted(items, key=lambda item: (-SIZES[item.dtype], item.name))
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for item in ordered:
        end = at + item.num_bytes
        shape = list(item.shape)
        header[item.name] = {"dtype": item.dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for item in ordered:
        tensor = contents.read(item.source, item.rank)
        # types unknown to safetensors are written as their bytes
        data = bytes_of(tensor.to(TORCH_TYPES[item.dtype]) if item.dtype in TORCH_TYPES else tensor)
        if len(data) != item.num_bytes:
            raise UnusableSnapshot(f"{item.source} has {len(data)} bytes, not {item.num_bytes}")
        yield data
        progress(item.num_bytes)


def _write(path: Path, blocks: Iterator[memoryview] | list[memoryview]) -> None:
    with path.open("xb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
