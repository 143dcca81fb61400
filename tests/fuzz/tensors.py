"""What becomes tensors: values, what a resume asks for, and whole snapshots read from memory."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import torch

from tests.fuzz import snapshots
from tests.fuzz.engine import Parser
from tests.fuzz.mutate import spell
from tests.fuzz.texts import as_json
from tests.state.helpers import registry, shard_of
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format import digest_check, json_io
from trainckpt.format import manifest as manifests
from trainckpt.format.digest import digest
from trainckpt.format.layout import replicated
from trainckpt.snapshot.restore import Reader
from trainckpt.state import values
from trainckpt.state.captured import VALUES, parse_values
from trainckpt.state.destination import Destination
from trainckpt.state.restore_targets import find_targets

REFUSALS = (TrainckptError,)
MOST_BYTES = 1 << 20
_TENSORS = {"t": torch.arange(6.0).reshape(2, 3), "u": torch.zeros(8, dtype=torch.uint8)}


def _tensor(node):
    name = node["$tensor"]
    if not isinstance(name, str) or name not in _TENSORS:
        raise UnusableSnapshot("there is no such tensor")
    return _TENSORS[name]


def run_values(data):
    found = values.decode(json_io.parse(data, "it", max_bytes=MOST_BYTES), _tensor)
    values.leaves(values.encode(found, "x", lambda path, tensor: {"$tensor": "t"}))


def _live():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return registry(model=model, optimizer=optimizer)


_LIVE = _live()
_SHARD = shard_of(_LIVE)
_HEAD, _DATA = _SHARD.head, bytes(_SHARD.data)
_REGIONS = {region.tensor: region for region in _SHARD.header.regions}
_ENTRIES = {
    name: manifests.TensorEntry(region.dtype, region.of, replicated(1))
    for name, region in _REGIONS.items()
}
_AT = _REGIONS[VALUES].first_byte
_VALUES = json.loads(_DATA[_AT : _AT + _REGIONS[VALUES].num_bytes])
_SMALL = {key: tree for key, tree in _VALUES.items() if key != "rng"}


def run_targets(data):
    raw = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
    tree = parse_values(raw)
    for world, then in ((1, 1), (1, 2)):
        found = find_targets(_LIVE, tree, _ENTRIES, world=world, then=then)
        assert found.wanted.keys() <= _ENTRIES.keys()
        for name in found.wraps:
            assert name in found.wanted


class _Tier:
    """A tier in memory that holds one file, and an older one."""

    def __init__(self, data):
        self.data = data

    def read_into(self, key, first_byte, into):
        data = _OLDER if "/s8~1.4/" in key else self.data
        part = data[first_byte : first_byte + len(into)]
        if len(part) != len(into):
            raise UnusableSnapshot(f"{key} ends too early")
        into[:] = part

    def read_parts(self, key, parts, done):
        for number, part in enumerate(parts):
            self.read_into(key, *part)
            done(number)


def run_restore(data):
    """A manifest, the length of a shard file's header, and the file."""
    text, _, file = data.partition(b"\n")
    manifest = manifests.load(text, "it")
    _check(manifest, file)
    wanted = dict.fromkeys(list(manifest.tensors)[:12])
    destination = Destination(wanted)
    Reader(_Tier(file), manifest).read(wanted, destination, donor=0)
    tensors = destination.finish({name: entry.dtype for name, entry in manifest.tensors.items()})
    for name, tensor in tensors.items():
        assert tensor.numel() <= max(len(file), len(_OLDER)) or not tensor.numel(), name


def _check(manifest, file):
    """By what its head holds, as it passes by: what is good is not with another bit."""
    entry = replace(manifest.files[0], digest="")
    if digest_check.is_file(memoryview(file), entry):
        assert len(file) == entry.num_bytes
        wrong = bytearray(file)
        wrong[len(file) // 2] ^= 1
        assert not digest_check.is_file(memoryview(wrong), entry), "a wrong bit was not found"


def spell_restore(tree, rng):
    """Digests made to fit, so that what is read is looked at."""
    if not isinstance(tree, dict) or not isinstance(tree.get("manifest"), dict):
        return spell(tree).encode()
    head = snapshots.spell_shard(tree.get("shard"), rng)[:-8]
    file = head + _DATA_SMALL
    manifest = dict(tree["manifest"])
    files = manifest.get("files")
    if isinstance(files, dict) and rng.random() < 0.95:
        size, ranks = 8 + int.from_bytes(head[:8], "little"), manifest.get("world")
        ranks = ranks if type(ranks) is int and 0 <= ranks < 9 else 1
        fits = {"headers": digest(file[:size]) * ranks, "digests": digest(file) * ranks}
        if rng.random() < 0.8:
            fits["bytes"] = [len(file)] * ranks
        manifest["files"] = {**files, **fits}
    return snapshots.sealed(manifest, rng) + b"\n" + file


_DATA_SMALL = bytes(range(256)) * 2
_PLACES = {
    "w": ("F32", [16, 3], 0, 192),
    "z": ("U8", [8, 8], 192, 256),
    "b": ("BF16", [64, 2], 256, 512),
}
_SMALL_SHARD = {
    "entries": {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}
        for name, (dtype, shape, first, last) in _PLACES.items()
    },
    "metadata": {
        "format": 2,
        "rank": 0,
        "world": 1,
        "digest": "xxh3_128",
        "dtypes": {"z": "complex64"},
        "digests": {
            name: digest(_DATA_SMALL[first:last]) for name, (_, _, first, last) in _PLACES.items()
        },
        "regions": {},
    },
    "data_bytes": 512,
}
_SMALL_MANIFEST = {
    **snapshots.MANIFEST_2,
    "world": 1,
    "layouts": [{"mesh": [1], "strides": [1], "base": 0, "dims": [-1], "order": [0]}],
    "tensors": {"w": ["F32", [16, 3], 0], "z": ["U8", [8, 8], "rank"], "b": ["BF16", [64, 2], 0]},
    "files": {"bytes": [0], "digests": "", "headers": ""},
}
_OLDER = snapshots.spell_shard(
    {
        "entries": {"o": {"dtype": "F32", "shape": [16, 3], "data_offsets": [0, 192]}},
        "metadata": {
            **_SMALL_SHARD["metadata"],
            "dtypes": {},
            "digests": {"o": digest(_DATA_SMALL[:192])},
        },
    },
    Random(0),
)[:-8]
_HEAD_BYTES = 8 + int.from_bytes(_OLDER[:8], "little")
_OLDER += _DATA_SMALL[:192]
_REFERRING = {
    "manifest": {
        **_SMALL_MANIFEST,
        "format": 3,
        "tensors": {**_SMALL_MANIFEST["tensors"], "o": ["F32", [16, 3], 0]},
        "reached": {
            "names": [snapshots.OLDER],
            "bytes": [len(_OLDER)],
            "digests": digest(_OLDER),
            "headers": digest(_OLDER[:_HEAD_BYTES]),
        },
    },
    "shard": {
        **_SMALL_SHARD,
        "metadata": {
            **_SMALL_SHARD["metadata"],
            "format": 3,
            "references": {snapshots.OLDER: ["o"]},
        },
    },
}
_TREES = [
    {
        "$": "dict",
        "of": [["a", 1], [{"$": "tuple", "of": [1, None]}, {"$tensor": "t"}]],
        "kind": "ordered",
    },
    {"$": "dict", "of": [["a", 1]], "kind": "default list"},
    {"$": "dict", "of": [["a", 1]], "kind": "counter"},
    [
        {"$": "set", "of": [1, "a"]},
        {"$": "frozenset", "of": []},
        {"$": "deque", "of": [1], "most": 3},
    ],
    [
        {"$": "bytes", "of": "AAEC"},
        {"$": "bytearray", "of": "AA=="},
        {"$": "float", "of": "nan"},
        {"$": "int", "of": "9" * 30},
        {"$": "complex", "of": ["0x1p+0", "-inf"]},
    ],
    [{"$": "dtype", "of": "float32"}, {"$": "device", "of": "cuda:1"}, {"$": "size", "of": [2, 3]}],
    [
        {"$": "numpy", "of": {"$tensor": "u"}, "dtype": "<i4", "shape": [2]},
        {"$": "numpy scalar", "of": {"$tensor": "u"}, "dtype": "<f8", "shape": []},
        {"$": "numpy dtype", "of": ">u2"},
        {"$": "numpy", "of": None, "dtype": "<f4", "shape": [0]},
    ],
]
_TAGS = (
    "$",
    "of",
    "$tensor",
    "kind",
    "most",
    "dtype",
    "shape",
    "tuple",
    "list",
    "dict",
    "set",
    "frozenset",
    "deque",
    "bytes",
    "bytearray",
    "int",
    "float",
    "complex",
    "device",
    "size",
    "numpy",
    "numpy scalar",
    "numpy dtype",
    "ordered",
    "counter",
    "default int",
    "t",
    "u",
    "float32",
    "qint8",
    "cpu",
    "meta",
    "<f8",
    "V8",
    "S9",
    "f4,i2",
    "(2,)f4",
    "O",
    "m8",
    "{'names': ['a']}",
    "f8,",
    "(1,,)f4",
    "?",
    "b",
    "c16",
    "3f4",
)
_NODES = (
    "$tensor",
    "parts",
    "sharded",
    "mesh",
    "placements",
    "shape",
    "stride",
    "state",
    "groups",
    "sparse",
    "order",
    "device",
    "fsdp",
    "ddp",
    "gradients",
    "S0",
    "R",
    "S0/2",
    "Psum",
    *_ENTRIES,
)
_SHARDED = {"mesh": " [2] [0, 1]", "placements": ["S0"], "shape": [2, 3], "stride": [3, 1]}

PARSERS = {
    "values": Parser("values", run_values, _TREES, as_json, _TAGS, REFUSALS),
    "targets": Parser(
        "targets",
        run_targets,
        [
            _SMALL,
            {"x": {"$tensor": "model/weight", "sharded": _SHARDED}},
            {
                "x": {"$tensor": "model/bias", "parts": ["model/weight"]},
                "optimizer": {},
                "fsdp": {},
            },
        ],
        as_json,
        _NODES,
        REFUSALS,
    ),
    "restore": Parser(
        "restore",
        run_restore,
        [{"manifest": _SMALL_MANIFEST, "shard": _SMALL_SHARD}, _REFERRING],
        spell_restore,
        ("manifest", "shard", *snapshots._WORDS, *snapshots._SHARD_WORDS),
        REFUSALS,
    ),
}
