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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.inspect.export_plan import FLOATS, SIZES, ExportItem, ExportPlan, split
from trainckpt.state.staging import bytes_of
from trainckpt.storage.local import TEMPORARY, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainckpt.inspect.contents import Contents

SUFFIX = ".safetensors"
NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_TORCH = {
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
    metadata = _metadata(contents, plan)
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
    _sync(folder)


def _of_an_export(folder: Path) -> list[Path]:
    """Return the files of an earlier export; other files in the folder are left alone."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if path.name in (NAME, INDEX) or _PART.fullmatch(path.name)]


def _names(number: int) -> list[str]:
    if number == 1:
        return [NAME]
    return [f"model-{i:05d}-of-{number:05d}{SUFFIX}" for i in range(1, number + 1)]


def _metadata(contents: Contents, plan: ExportPlan) -> dict[str, str]:
    kinds = {f"{item.name}:type": item.kind for item in plan.items if item.kind}
    return {**plan.tied, **kinds, "format": "pt", "trainckpt": str(contents.manifest.name)}


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
        places = [at, at + item.num_bytes]
        header[item.name] = {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": places,
        }
        at = places[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for item in ordered:
        data = bytes_of(_converted(contents.read(item.source, item.rank), item))
        if len(data) != item.num_bytes:
            raise UnusableSnapshot(f"{item.source} has {len(data)} bytes, not {item.num_bytes}")
        yield data
        progress(item.num_bytes)


def _converted(tensor: torch.Tensor, item: ExportItem) -> torch.Tensor:
    """Convert to the written type; types unknown to safetensors are written as their bytes."""
    wanted = _TORCH.get(item.dtype)
    if item.dtype in FLOATS and wanted is not None:
        return tensor.to(wanted)
    return tensor


def _write(path: Path, blocks: Iterator[memoryview] | list[memoryview]) -> None:
    with path.open("xb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
