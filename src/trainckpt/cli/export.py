"""export: write one checkpoint in a format of other libraries."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.cli import output
from trainckpt.errors import ConfigurationError
from trainckpt.format.globs import parse_globs
from trainckpt.run_directory import run_tiers

if TYPE_CHECKING:
    from trainckpt.inspect.contents import Contents

DTYPES = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}
FORMATS = ("safetensors", "hf", "torch", "dcp")
DEFAULT = "5GB"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB)", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add = parser.add_argument
    add("target", metavar="RUN[@SNAPSHOT]", help="default: the latest snapshot")
    add("out", metavar="OUT", type=Path, help="file (.safetensors, or with torch) or folder")
    add("--format", choices=FORMATS, default=FORMATS[0], help="default: safetensors")
    add(
        "--max-shard-size",
        type=_size,
        metavar="SIZE",
        help=f"largest file in a folder (default: {DEFAULT})",
    )
    add(
        "--tensors",
        type=_globs,
        default=(),
        metavar="GLOB",
        help="tensors to write, such as 'model/*'",
    )
    add("--all", action="store_true", help="write all tensors, under full names")
    add("--dtype", choices=DTYPES, help="convert floating point tensors")
    add("--tied", choices=("once", "copy"), default="once", help="tied weights (default: once)")
    add("--force", action="store_true", help="replace an existing export")


def execute(arguments: argparse.Namespace) -> int:
    """Plan it, write it, say what was written."""
    from trainckpt.inspect import export
    from trainckpt.inspect.contents import Contents

    out: Path = arguments.out
    _check(arguments, is_file=export.is_one_file(out))
    if arguments.format in ("torch", "dcp"):
        return _torch(arguments)
    export.check_out(out, force=arguments.force)
    contents = Contents(run_tiers.open_source(arguments.target))
    spec = export.ExportSpec(
        arguments.tensors, arguments.all, arguments.tied == "copy", DTYPES.get(arguments.dtype, "")
    )
    plan = export.plan_export(contents, spec)
    total = sum(item.num_bytes for item in plan.items)
    with output.progress() as progress:
        task = progress.add_task("writing", total=total)
        files = export.export(
            contents,
            plan,
            out,
            most_bytes=arguments.max_shard_size or _size(DEFAULT),
            force=arguments.force,
            progress=lambda done: progress.advance(task, done),
        )
    notes = [*contents.source.passed_over, *plan.notes]
    if not arguments.all:
        notes += _window_notes(contents)
    if arguments.format == "hf" and not (out / "config.json").exists():
        notes.append(f"{out} has no config.json: model.config.save_pretrained writes it")
    _say(notes)
    name = str(contents.manifest.name)
    if arguments.json:
        rows = [{"name": f.path.name, "bytes": f.num_bytes, "tensors": f.tensors} for f in files]
        url = contents.source.tier.url
        document: dict[str, Any] = {"run": url, "snapshot": name, "out": str(out)}
        document |= {"files": rows, "tensors": len(plan.items), "tied": plan.tied, "notes": notes}
        output.document(document)
        return 0
    for f in files:
        print(f"{f.path}: {f.tensors} tensors of {name}, {output.size(f.num_bytes)}")
    if plan.tied:
        names = ", ".join(f"{name} is {kept_name}" for name, kept_name in sorted(plan.tied.items()))
        print(f"written once: {names} (--tied copy writes each)")
    return 0


def _check(arguments: argparse.Namespace, *, is_file: bool) -> None:
    kind = arguments.format
    if kind == "hf" and is_file:
        raise ConfigurationError(f"{arguments.out} is one file, not a folder", hint="name a folder")
    if arguments.max_shard_size and (is_file or kind in ("torch", "dcp")):
        what = f"--format {kind}" if kind in ("torch", "dcp") else f"{arguments.out} is one file"
        raise ConfigurationError(
            f"{what}, so --max-shard-size says nothing", hint="name a folder, with --format hf"
        )
    if kind in ("torch", "dcp") and arguments.all and arguments.tensors:
        raise ConfigurationError(
            f"--format {kind} --all writes whole objects", hint="leave --tensors or --all out"
        )


def _torch(arguments: argparse.Namespace) -> int:
    """Write a `torch.save` file or a DCP directory, say what was written."""
    from trainckpt.inspect import export, export_torch
    from trainckpt.inspect.contents import Contents

    out, kind = arguments.out, arguments.format
    export_torch.check_out(out, kind, force=arguments.force)
    contents = Contents(run_tiers.open_source(arguments.target))
    dtype = DTYPES.get(arguments.dtype, "")
    spec = export.ExportSpec(arguments.tensors, arguments.all, dtype=dtype)
    with output.progress() as progress:
        task = progress.add_task("writing", total=None)
        done = export_torch.export(
            contents,
            spec,
            out,
            kind,
            force=arguments.force,
            progress=lambda num_bytes: progress.advance(task, num_bytes),
        )
    notes = [*contents.source.passed_over, *done.notes, *_window_notes(contents)]
    _say(notes)
    name = str(contents.manifest.name)
    if arguments.json:
        document = {"run": contents.source.tier.url, "snapshot": name, "out": str(out)}
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in done.files]
        output.document({**document, "files": files, "tensors": done.tensors, "notes": notes})
        return 0
    num_bytes = sum(path.stat().st_size for path in done.files)
    print(f"{out}: {done.tensors} tensors of {name}, {output.size(num_bytes)}")
    return 0


def _window_notes(contents: Contents) -> list[str]:
    """Name the gradients that a snapshot inside a window holds, and these formats do not."""
    done = contents.manifest.name.micro
    note = (
        f"not in it: the gradients of the first {done} micro-batches of a window; snapshots at the "
        "end of a step have none (trainckpt list)"
    )
    return [note] if done else []


def _say(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * 1000 ** output.UNITS.index(match[2].upper()))


def _globs(text: str) -> tuple[str, ...]:
    try:
        return parse_globs(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a glob, or several with commas"
        ) from None
