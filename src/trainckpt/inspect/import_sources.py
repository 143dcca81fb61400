"""Open the checkpoint of another library: its state as tensors mapped from its files, and values.

    safetensors   a file; or a Hugging Face folder, with an index or without
    torch         a file of `torch.save`, read with `weights_only`; or a Hugging Face folder of them
    lightning     a Lightning `.ckpt`, which is such a file with names of its own
    dcp           a directory of `torch.distributed.checkpoint`, whatever layout wrote it

Nothing of a source is executed. torch's reader admits tensors, numbers, texts and containers. The
metadata of DCP is a pickle, and read by `dcp_metadata` in a process of its own. All tensors are
mapped, not read: those of DCP from temporary files in which their parts are put together.

The parts of a source are told by their content, and have the names of their keys: a dict of tensors
is a model, a dict with `state` and `param_groups` an optimizer, any other dict an object such as a
scheduler, and whole numbers called `step` or `global_step` the position.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.inspect import dcp_metadata
from trainckpt.inspect.export_torch import mapped
from trainckpt.state.values import DTYPES

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable, Mapping

    from torch.distributed.checkpoint import metadata as kinds

SAFETENSORS, TORCH, LIGHTNING, DCP, HUGGING_FACE = (
    *("safetensors", "torch.save", "Lightning", "DCP"),
    "Hugging Face",
)
# Keys by other names than those in the docs' examples of `Checkpointer`.
NAMES = {"state_dict": "model", "optim": "optimizer", "lr_scheduler": "scheduler"}
STEPS = ("global_step", "step", "iteration")
EXTRA = "_extra_state"
_WRAPPERS = ("module.", "_orig_mod.")  # of DDP and of torch.compile
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_OF_A_TRAINER = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "trainer_state.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_MAX_INDEX_BYTES = 256_000_000


@dataclass
class ImportedState:
    """The state of a checkpoint, in the terms of tracked objects.

    Attributes:
        format: Name of its format.
        models: Tracked name -> path in the module -> tensor, or an extra state.
        optimizers: Tracked name -> its state_dict, parameters by number or by path.
        objects: Tracked name -> its state_dict.
        epoch: Completed epochs, if the source says so.
        step: Completed optimizer steps.
        left: Part that was not taken -> the reason.
        tied: Model -> path -> the first path of the same tensor, as far as the source tells.
    """

    format: str
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    epoch: int | None = None
    step: int = 0
    left: dict[str, str] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)


def open_checkpoint(source: Path, scratch: Path) -> ImportedState:
    """Open a checkpoint of another library.

    Args:
        source: File or folder.
        scratch: Folder for temporary files, used as long as the tensors are.

    Raises:
        ConfigurationError: Nothing there, or of no known format, or without a model.
        UnusableSnapshot: Damaged, or with content that only code could read.
    """
    if not source.exists():
        raise ConfigurationError(f"{source} does not exist", hint="name a file or a folder")
    try:
        found = _open(source, scratch)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnusableSnapshot(
            f"{source} is not laid out as its format is: {type(error).__name__}: {_first(error)}"
        ) from error
    if not found.models:
        raise ConfigurationError(
            f"{source} holds no model: {', '.join(found.left) or 'nothing at all'}",
            hint="a model is a dict of tensors, alone or under a key of its own",
        )
    return found


def _open(source: Path, scratch: Path) -> ImportedState:
    if source.is_dir():
        found = _folder(source, scratch)
    elif source.suffix == ".safetensors":
        found = _sorted(_safetensors([source]), SAFETENSORS)
        found.tied = {name: _tied_by_metadata(source) for name in found.models}
    else:
        found = _torch(source)
    _plain_paths(found)
    return found


def _folder(source: Path, scratch: Path) -> ImportedState:
    if (source / ".metadata").is_file():
        return _sorted(_dcp(source, scratch), DCP)
    for name in (*_INDEXES, *_WHOLE):
        if not (source / name).is_file():
            continue
        files = _indexed(source / name) if name in _INDEXES else [source / name]
        is_torch = name.startswith("pytorch")
        tensors = _torch_files(files) if is_torch else _safetensors(files)
        found = _sorted(tensors, HUGGING_FACE)
        others = [n for n in _OF_A_TRAINER if (source / n).exists()]
        found.left.update(dict.fromkeys(others, "only the Trainer restores it"))
        if name == _WHOLE[0]:
            found.tied = {model: _tied_by_metadata(source / name) for model in found.models}
        return found
    looked = ", ".join((".metadata (DCP)", *_INDEXES, *_WHOLE))
    raise ConfigurationError(
        f"{source} is a folder of no known format: it has none of {looked}",
        hint="name a file in it, or another folder",
    )


def _indexed(index: Path) -> list[Path]:
    """Return the files of a Hugging Face index; they lie beside it."""
    what = index.name
    body = json_io.parse(index.read_bytes(), what, max_bytes=_MAX_INDEX_BYTES)
    names = json_io.field(body, "weight_map", dict, what).values()
    return [_inside(index.parent, name, what) for name in sorted({str(name) for name in names})]


def _inside(folder: Path, name: str, what: str) -> Path:
    """Return the path of a file that another file names; it must lie in the folder."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\\" in name:
        raise UnusableSnapshot(f"{what} names a file outside its folder: {name[:100]}")
    return folder.joinpath(*parts)


# ---- safetensors


def _safetensors(files: Iterable[Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                found.update((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UnusableSnapshot(f"{file} is not readable: {error}") from error
    return found


def _tied_by_metadata(file: Path) -> dict[str, str]:
    """Return the other names of tensors, as `safetensors.torch.save_model` writes them."""
    with safe_open(file, "pt") as opened:
        names = {*opened.keys()}
        metadata = opened.metadata() or {}
    return {name: first for name, first in metadata.items() if first in names and name not in names}


# ---- torch.save, and Lightning


def _torch(source: Path) -> ImportedState:
    tree = _load_torch(source)
    if isinstance(tree, dict) and "pytorch-lightning_version" in tree:
        return _lightning(tree)
    if not isinstance(tree, dict):
        raise ConfigurationError(
            f"{source} holds a {type(tree).__qualname__}, not a dict",
            hint='save {"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
        )
    return _sorted(tree, TORCH)


def _torch_files(files: Iterable[Path]) -> dict[str, Any]:
    return {name: tensor for file in files for name, tensor in _load_torch(file).items()}


def _load_torch(source: Path) -> Any:
    def load(*, is_mapped: bool) -> Any:
        return torch.load(source, map_location="cpu", mmap=is_mapped, weights_only=True)

    try:
        try:
            return load(is_mapped=True)
        except RuntimeError:  # before torch 1.6 it was no zip file
            return load(is_mapped=False)
    except pickle.UnpicklingError as error:
        raise UnusableSnapshot(
            f"{source} cannot be read without running code: {_unsafe(source) or _first(error)}",
            hint="if you trust it, load it with weights_only=False in a program of your own, and "
            "save what is tensors, numbers and texts again",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UnusableSnapshot(f"{source} is no file of torch.save: {_first(error)}") from error


def _unsafe(source: Path) -> str:
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception:  # noqa: BLE001 - only for the message
        return ""
    return f"it needs {', '.join(sorted(found)[:5])}" if found else ""


def _first(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def _lightning(tree: dict[str, Any]) -> ImportedState:
    lists = {"optimizer_states": "optimizer", "lr_schedulers": "scheduler"}
    parts = {"model": tree.get("state_dict", {})}
    for key, name in lists.items():
        items = tree.get(key) or []
        numbered = {f"{name}.{i}": item for i, item in enumerate(items)}
        parts |= numbered if len(items) > 1 else dict.fromkeys((name,), items[0]) if items else {}
    found = _sorted(parts, LIGHTNING)
    found.step = tree.get("global_step", 0)
    progress = tree.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
    found.epoch = progress.get("current", {}).get("processed", tree.get("epoch", 0))
    if type(found.step) is not int or type(found.epoch) is not int:
        raise TypeError(f"global_step {found.step!r} and epoch {found.epoch!r} are not numbers")
    known = {"state_dict", "epoch", "global_step", "pytorch-lightning_version", *lists}
    for key in tree.keys() - known:
        if tree[key]:
            found.left[key] = "only Lightning restores it"
    return found


# ---- DCP


def _dcp(source: Path, scratch: Path) -> dict[str, Any]:
    """Read all tensors and values of a DCP directory, nested as they were saved."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    described = _read_metadata(source)

    class DcpReader(FileSystemReader):
        """Reads by metadata that is known already, where the base class unpickles it."""

        def read_metadata(self, *_: Any, **__: Any) -> kinds.Metadata:
            found: kinds.Metadata = _metadata(described, source)
            return found

    class DcpPlanner(DefaultLoadPlanner):
        """Unpickles values by torch's restricted reader, where the base class admits all."""

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            name = read_item.dest_index.fqn
            try:
                self.state_dict[name] = torch.load(value, weights_only=True)
            except pickle.UnpicklingError:
                self.state_dict[name] = _Unreadable()

    flat: dict[str, Any] = {}
    for number, (name, entry) in enumerate(described["tensors"].items()):
        empty = torch.empty(entry["size"], dtype=DTYPES[entry["dtype"]], device="meta")
        flat[name] = mapped(empty, scratch / str(number), copied=False)
    flat |= dict.fromkeys(described["objects"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")
        try:
            planner = DcpPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(flat, storage_reader=DcpReader(source), planner=planner)
        except CheckpointException as error:
            raise UnusableSnapshot(f"{source} is not readable: {_first(error)}") from error
    return _nested(flat, described["paths"] or {})


class _Unreadable:
    """A value that only code could read."""


def _read_metadata(source: Path) -> dict[str, Any]:
    with (source / ".metadata").open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-I", dcp_metadata.__file__],
            stdin=file,
            capture_output=True,
            check=False,
        )
    try:
        described: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.decode(errors="replace").strip()[-300:]
        described = {"refused": f"its reader ended with {done.returncode}: {reason}"}
    if "refused" in described:
        raise UnusableSnapshot(
            f"{source / '.metadata'} is not the metadata of DCP: {described['refused']}"
        )
    return described


def _metadata(described: dict[str, Any], source: Path) -> Any:
    """Return DCP's metadata from its description."""
    from torch.distributed.checkpoint import filesystem, metadata

    size = torch.Size
    entries: dict[str, Any] = {
        name: metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=DTYPES[entry["dtype"]]),
            size(entry["size"]),
            [metadata.ChunkStorageMetadata(size(at), size(of)) for at, of in entry["chunks"]],
        )
        for name, entry in described["tensors"].items()
    }
    entries |= {name: metadata.BytesStorageMetadata() for name in described["objects"]}
    storage = {}
    for name, offset, file, first_byte, num_bytes, transforms in described["storage"]:
        _inside(source, file, ".metadata")
        index = metadata.MetadataIndex(name, None if offset is None else size(offset))
        info: Any = filesystem._StorageInfo(file, first_byte, num_bytes)
        info.transform_descriptors = transforms or None
        storage[index] = info
    return metadata.Metadata(entries, storage_data=storage, storage_meta=metadata.StorageMeta())


def _nested(flat: Mapping[str, Any], paths: Mapping[str, list[str | int]]) -> dict[str, Any]:
    """Return the state_dict as it was before DCP flattened it; lists as lists."""
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = paths.get(name) or [name]
        at = tree
        for key in above:
            at = at.setdefault(key, {})
        at[last] = value
    result = _with_lists(tree)
    assert isinstance(result, dict)
    return result


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(type(key) is int for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {key: _with_lists(value) for key, value in tree.items()}


# ---- the parts of a source


def _sorted(tree: Mapping[str, Any], kind: str) -> ImportedState:
    """Sort the parts of a checkpoint by their content."""
    found = ImportedState(kind)
    if _is_model(tree):
        found.models["model"] = dict(tree)
        return found
    for key, part in tree.items():
        name = NAMES.get(key, str(key).removesuffix("_state_dict"))
        if key in STEPS and type(part) is int:
            found.step = max(found.step, part)
        elif _is_model(part):
            found.models[name] = dict(part)
        elif (optimizer := _optimizer(part)) is not None:
            found.optimizers[name] = optimizer
        elif isinstance(part, dict) and part and not _has_unreadable(part):
            found.objects[name] = part
        elif isinstance(part, _Unreadable) or _has_unreadable(part):
            found.left[str(key)] = "only code could read it"
        elif key == "epoch":
            found.left["epoch"] = f"it is {part}, begun or completed: say --epoch N"
        elif part is not None and part != {}:
            found.left[str(key)] = f"a {type(part).__qualname__}, not the state of an object"
    found.step = found.step or max(map(_steps, found.optimizers.values()), default=0)
    return found


def _has_unreadable(part: Any) -> bool:
    items = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return isinstance(part, _Unreadable) or any(map(_has_unreadable, items))


def _is_model(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and any(isinstance(value, torch.Tensor) for value in part.values())
        and all(
            isinstance(key, str) and (isinstance(value, torch.Tensor) or key.endswith(EXTRA))
            for key, value in part.items()
        )
        and not any(key.startswith(("state.", "param_groups.")) for key in part)
    )


def _optimizer(part: Any) -> dict[str, Any] | None:
    """Return the state_dict if the part is one of an optimizer; a flattened one nested."""
    if not isinstance(part, dict) or _has_unreadable(part):
        return None
    groups = part.get("param_groups")
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        state = part.get("state") or {}  # DCP drops an empty one, and spells numbers as texts
        numbers = {str(key): key for group in groups for key in group["params"]}
        return {**part, "state": {numbers.get(str(k), k): items for k, items in state.items()}}
    if not part or not all(str(k).startswith(("state.", "param_groups.")) for k in part):
        return None
    flat: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in part.items():
        kind, _, rest = key.partition(".")
        path, _, item = rest.rpartition(".")
        (flat if kind == "state" else options).setdefault(path, {})[item] = value
    one_each = [{**each, "params": [path]} for path, each in options.items()]
    return {"state": flat, "param_groups": one_each}


def _steps(optimizer: Mapping[str, Any]) -> int:
    """Return the steps that an optimizer has counted."""
    state = optimizer["state"]
    items = state.values() if isinstance(state, dict) else ()
    counts = [item["step"] for item in items if isinstance(item, dict) and "step" in item]
    return max((int(count) for count in counts), default=0)


def _plain_paths(found: ImportedState) -> None:
    """Take off the prefixes that DDP and torch.compile give to every name."""
    for name, tensors in found.models.items():
        prefix = ""
        while wrapper := next(
            (w for w in _WRAPPERS if all(path.startswith(prefix + w) for path in tensors)), ""
        ):
            prefix += wrapper
        found.models[name] = {path.removeprefix(prefix): t for path, t in tensors.items()}
        if not prefix:
            continue
        tied = found.tied.get(name, {}).items()
        found.tied[name] = {a.removeprefix(prefix): b.removeprefix(prefix) for a, b in tied}
        for optimizer in found.optimizers.values():
            _rename(optimizer, prefix)


def _rename(optimizer: dict[str, Any], prefix: str) -> None:
    def plain(key: Any) -> Any:
        return key.removeprefix(prefix) if isinstance(key, str) else key

    optimizer["state"] = {plain(key): items for key, items in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [plain(key) for key in group["params"]]
