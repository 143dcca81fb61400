"""Export one snapshot as torch's own checkpoints: a `torch.save` file, or a DCP directory.

    torch   OUT     `torch.load(OUT)` gives the model's state_dict
    dcp     OUT/    `dcp.load(model.state_dict(), checkpoint_id=OUT)`, into any layout

With `everything` the state of every tracked object is in it under its tracked name, as it is in a
checkpoint of a script's own: `{"model": ..., "optimizer": ..., "scheduler": ...}`. An optimizer has
the form of its `state_dict` in a `torch.save` file (parameters by number). In a DCP directory it
has the form that torch gives it for DCP (parameters by name).

Both libraries want the whole state at once. So each tensor is written to a temporary file beside
OUT and mapped from there: the system can drop its pages, and one tensor at a time is in memory.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import ConfigurationError
from trainckpt.inspect.contents import models_in
from trainckpt.inspect.export import TORCH_TYPES, ExportSpec, choose, few, sync_folder
from trainckpt.state import imported, values
from trainckpt.state.captured import Saved
from trainckpt.state.registry import RESERVED
from trainckpt.storage.local import TEMPORARY, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainckpt.inspect.contents import Contents

TORCH, DCP = "torch", "dcp"
_DCP_METADATA = ".metadata"


@dataclass(frozen=True)
class TorchExport:
    """A finished export.

    Attributes:
        tensors: Number of tensors, tied ones once.
        files: The files at OUT.
        notes: Facts for the reader of the files, one sentence each.
    """

    tensors: int
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def check_out(out: Path, kind: str, *, force: bool) -> None:
    """Refuse to replace anything but an earlier export of the same kind, and that only by force;
    `ConfigurationError`."""
    if not out.exists():
        return
    is_earlier = (out / _DCP_METADATA).is_file() if kind == DCP else out.is_file()
    if not is_earlier:
        what = "a folder" if kind == TORCH else "not a DCP directory"
        raise ConfigurationError(f"{out} exists already and is {what}", hint="choose another place")
    if not force:
        raise ConfigurationError(
            f"{out} exists already", hint="choose another place, or add --force"
        )


def export(
    contents: Contents,
    spec: ExportSpec,
    out: Path,
    kind: str,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> TorchExport:
    """Write the snapshot to OUT; whole on return, and absent after an error.

    Args:
        contents: The snapshot.
        spec: Tensors and their type; with `everything` no globs.
        out: File or folder.
        kind: "torch" or "dcp".
        force: Replace an earlier export.
        progress: Called with the bytes of each tensor after it is read.

    Raises:
        ConfigurationError: OUT exists, or there is no tensor to choose.
        UnusableSnapshot: a byte read does not match its digest; nothing is left behind.
        TierUnavailable: a tier refused.
    """
    check_out(out, kind, force=force)
    part = out.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    with translated("write", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=out.parent) as scratch:
            state = _ExportedState(contents, spec.dtype, Path(scratch), progress)
            by_name = kind == DCP
            body = state.objects(by_name=by_name) if spec.everything else state.model(spec.globs)
            try:
                (_save_dcp if kind == DCP else _save_torch)(body, part)
                _put(part, out)
            finally:
                _remove(part)
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    return TorchExport(state.tensors, tuple(files), tuple(state.notes))


class _ExportedState:
    """The state in torch's own form, its tensors mapped from temporary files.

    Attributes:
        tensors: Number of tensors read.
        notes: Facts for the reader of the files.
    """

    def __init__(
        self,
        contents: Contents,
        dtype: str,
        scratch: Path,
        progress: Callable[[int], None],
    ) -> None:
        self._contents, self._dtype = contents, dtype
        self._scratch, self._progress = scratch, progress
        self._values = contents.values()
        self._read: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []

    @property
    def tensors(self) -> int:
        """Return the number of tensors read, tied ones once."""
        return len(self._read)

    def model(self, globs: tuple[str, ...]) -> dict[str, Any]:
        """Return the chosen tensors of one model under the names of its `state_dict`."""
        names, chosen, owners = choose(self._contents, self._values, ExportSpec(globs))
        prefix = f"{owners[0]}/"
        found: dict[str, Any] = {
            name.removeprefix(prefix): self._tensor(names[name]) for name in sorted(chosen)
        }
        tree = self._values[owners[0]]
        if chosen == {name for name in names if name.startswith(prefix)}:
            for path, extra in tree["extra"].items():
                found[f"{path}._extra_state" if path else "_extra_state"] = self._decode(extra)
        manifest = self._contents.manifest
        own = sorted(name for name in chosen if manifest.tensors[names[name]].layout is None)
        if own and manifest.world > 1:
            ranks = f"each of {manifest.world} ranks"
            self.notes.append(f"{ranks} has its own, here is rank 0's: {few(own)}")
        if tree.get("excluded"):
            self.notes.append(f"not in the snapshot, excluded: {few(tree['excluded'])}")
        return found

    def objects(self, *, by_name: bool) -> dict[str, Any]:
        """Return tracked name -> state of that object."""
        models = models_in(self._values)
        found: dict[str, Any] = {model: self.model((f"{model}/*",)) for model in models}
        left = {*self._values["loaders"], "rng"}
        for name, tree in self._values.items():
            if name in found or name in left or name in RESERVED:
                continue
            if isinstance(tree, dict) and tree.keys() >= {"groups", "state"}:
                if by_name and _is_numbered(tree):  # imported so
                    left.add(name)
                    continue
                found[name] = _optimizer(tree, self._decode, by_name=by_name)
            elif isinstance(tree, dict) and "live" in tree:
                left.add(name)
            else:
                found[name] = self._decode(tree)
        self.notes.append(f"not in it: {', '.join(sorted(left))}; only trainckpt restores them")
        return found

    def _decode(self, tree: Any) -> Any:
        return values.decode(tree, self._node)

    def _node(self, node: Any) -> torch.Tensor:
        """Return the tensor of a node: a mapped one, or one put together from several parts."""
        parts = node.get("parts")
        if parts is None:
            return self._tensor(node["$tensor"])
        return Saved({name: self._contents.read(name) for name in parts}, {}).tensor(node)

    def _tensor(self, source: str) -> torch.Tensor:
        if source not in self._read:
            tensor = self._contents.read(source)
            if self._dtype and tensor.is_floating_point():
                tensor = tensor.to(TORCH_TYPES[self._dtype])
            self._read[source] = mapped(tensor, self._scratch / str(len(self._read)))
            self._progress(tensor.nbytes)
        return self._read[source]


def _is_numbered(tree: Mapping[str, Any]) -> bool:
    names = [name for group in tree["groups"] for name in group["params"]]
    return any(name.startswith(imported.BY_NUMBER) for name in names)


def _optimizer(tree: Mapping[str, Any], decode: Callable[[Any], Any], *, by_name: bool) -> Any:
    """Return an optimizer's state_dict; `by_name` in the form for DCP."""
    names = [name for group in tree["groups"] for name in group["params"]]
    keys: dict[str, Any] = {name: i for i, name in enumerate(names)}
    if by_name:
        keys = {name: name.partition("/")[2] or name for name in names}
    groups = [
        {**decode(group["options"]), "params": [keys[name] for name in group["params"]]}
        for group in tree["groups"]
    ]
    state = {
        keys[name]: {decode(key): decode(value) for key, value in items}
        for name, items in tree["state"].items()
        if name in keys
    }
    return {"state": state, "param_groups": groups}


def mapped(tensor: torch.Tensor, path: Path, *, copied: bool = True) -> torch.Tensor:
    """Return the tensor in a mapped file, with a storage of its own; or only the space for it."""
    if not tensor.nbytes:
        return torch.empty_like(tensor, device="cpu")
    with translated("write", path), path.open("xb") as file:
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a signal later
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
    kept = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    kept = kept.view(tensor.shape)
    return kept.copy_(tensor) if copied else kept


def _save_torch(state: dict[str, Any], path: Path) -> None:
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _save_dcp(state: dict[str, Any], folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")
        save(state, storage_writer=FileSystemWriter(folder, sync_files=True))


def _put(part: Path, out: Path) -> None:
    """Rename the finished export into place. The earlier one is set aside before, if a folder."""
    old = part.with_name(f"{part.name}.old")
    if out.is_dir():
        out.rename(old)
    part.replace(out)
    sync_folder(out.parent)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
