"""Read the metadata of a DCP directory, which is a pickle, as JSON. A program of its own.

    python -I dcp_metadata.py < .metadata

A pickle can name any function and call it. This program admits only the names in `ADMITTED`, and
builds a plain record for each: nothing of torch, or of any other library, is imported or called. It
needs no file, so before it reads the first byte it gives up what an attack would need: new files
and sockets (RLIMIT_NOFILE), growing files (RLIMIT_FSIZE), processes (RLIMIT_NPROC), and, where the
system lets a user have name spaces, the network. Windows has none of these limits; there the list
of names alone protects.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import io
import json
import pickle
import re
import sys
from typing import Any

METADATA = "torch.distributed.checkpoint.metadata"
OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
ADMITTED = {
    METADATA: {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    OLD_METADATA: {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
PLAIN = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "Path"): lambda *parts: "/".join(parts),
}
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # flags of unshare(2)


class Record:
    """An object of an admitted class: its attributes alone."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # of a class with slots
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __hash__(self) -> int:
        return id(self)  # keys of `storage_data`; their attributes come after

    def get(self, name: str) -> Any:
        """Return an attribute, or None."""
        return self.__dict__.get(name)


class Unpickler(pickle.Unpickler):
    """Admits the classes of the metadata, and torch's names of element types."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for an admitted name; `UnpicklingError` for any other."""
        if name in ADMITTED.get(module, ()):
            return type(name, (Record,), {})
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        if module == "torch" and TYPE.fullmatch(name):
            return name  # of a dtype: only ever looked up in a table
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP's metadata does not")


TYPE = re.compile(r"bool|(b?float|q?u?int|b?complex|bits)[0-9][0-9a-z_]*")


def shut_in() -> None:
    """Give up files, sockets, processes and the network, as far as the system can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)
    with contextlib.suppress(ImportError):
        import resource

        for kind in ("RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE", "RLIMIT_NOFILE"):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, kind), (0, 0))


def described(metadata: Any) -> dict[str, Any]:
    """Return the metadata as JSON.

    tensors   name -> `dtype`, `size`, `chunks`: [offsets, sizes] of each
    objects   names of what is no tensor
    paths     name -> its path in the nested state_dict; null if it was not nested
    storage   [name, offsets or null, file, first byte, bytes, transforms] of each chunk or object
    """
    tensors, objects = {}, []
    for name, entry in metadata.get("state_dict_metadata").items():
        if type(entry).__name__ != "TensorStorageMetadata":
            objects.append(name)
            continue
        properties = entry.get("properties")
        dtype = properties.get("dtype") or properties.get("state")[0]
        chunks = [[list(c.get("offsets")), list(c.get("sizes"))] for c in entry.get("chunks")]
        tensors[name] = {"dtype": dtype, "size": list(entry.get("size")), "chunks": chunks}
    storage = []
    for index, info in metadata.get("storage_data").items():
        offset = index.get("offset")
        storage.append(
            [
                index.get("fqn"),
                None if offset is None else list(offset),
                info.get("relative_path"),
                info.get("offset"),
                info.get("length"),
                list(info.get("transform_descriptors") or ()),
            ]
        )
    paths = metadata.get("planner_data")
    paths = {k: list(v) for k, v in paths.items()} if isinstance(paths, dict) else None
    return {"tensors": tensors, "objects": objects, "paths": paths, "storage": storage}


def main() -> int:
    """Read the pickle from stdin, and print JSON: the metadata, or `{"refused": reason}`."""
    data = io.BytesIO()
    shut_in()
    while part := sys.stdin.buffer.read(1 << 20):
        data.write(part)
    data.seek(0)
    try:
        answer = described(Unpickler(data).load())
    except Exception as error:  # noqa: BLE001 - the caller reports it
        answer = {"refused": f"{type(error).__name__}: {error}"[:500]}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
