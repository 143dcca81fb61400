"""What a snapshot consists of: manifests and plans made of them, layouts, headers, cursors."""

from __future__ import annotations

import json
from itertools import islice

from tests.fuzz.engine import Parser
from tests.fuzz.mutate import spell
from tests.fuzz.texts import as_json, envelope
from trainckpt.errors import TrainckptError
from trainckpt.format import json_io, shard_file
from trainckpt.format import manifest as manifests
from trainckpt.format.cursor import Cursor
from trainckpt.format.digest import digest
from trainckpt.format.layout import Box, Layout, Stretch, whole
from trainckpt.format.names import SnapshotName, reached_file
from trainckpt.snapshot.restore_plan import RegionRead, find, plan_restore, span

REFUSALS = (TrainckptError,)
MOST_READS = 2000
COLUMNS = Layout((3,), (1,), 0, (1,), (0,))
D = digest(b"d")


def sealed(tree, rng):
    """An object with a digest of itself that fits, as anybody could write it."""
    if not isinstance(tree, dict) or (draw := rng.random()) > 0.97:
        return spell(tree).encode()
    rest = {key: value for key, value in tree.items() if key != "digest"}
    text = spell(rest, sort=True)
    if draw > 0.9:  # numbers such as 1e400 are spelled in another way once they were read
        text = _canonical(text)
    end = "," if rest else ""
    return f'{text[:-1]}{end}"digest":"{digest(text.encode())}"}}'.encode()


def _canonical(text):
    try:
        return json_io.canonical(json.loads(text)).decode()
    except (ValueError, RecursionError):
        return text


def run_manifest(data):
    found = manifests.load(data, "it")
    assert found.world == len(found.files) >= 1, "a world without ranks"
    assert all(0 <= n < 2**63 for n in found.cursor.place()), "a cursor out of range"
    str(found.cursor), found.num_bytes, [*found.files[:3]]
    for name, entry in islice(found.tensors.items(), 8):
        parts = [None, whole(entry.shape), Box((0,) * len(entry.shape), (1,) * len(entry.shape))]
        for part in parts:
            try:
                reads = plan_restore(found, {name: part}, donor=0)
            except TrainckptError:
                continue
            assert all(0 <= read.file < found.world for read in reads), "a file that is not there"
            if part is None and entry.layout is not None:
                covered = sum(shard_file.num_bytes(r.region.shape, entry.dtype) for r in reads)
                assert covered == entry.num_bytes, "a plan that does not cover its tensor"
    assert all(reached_file(file.name)[0] < found.name for file in found.reached), "no older file"
    assert not any(c in file.name for file in found.reached for c in "\\\0"), "a way out"
    again = manifests.load(manifests.dump(found), "it")
    assert sorted(again.reached, key=str) == sorted(found.reached, key=str)
    assert again.tensors == found.tensors
    assert again.cursor == found.cursor


def run_layout(data):
    tree = envelope(data)
    if not isinstance(tree, dict):
        return
    world = tree.get("world")
    world = world if type(world) is int else 8
    layout = Layout.from_json(tree.get("layout"), world, "it")
    shape = json_io.counts(tree.get("shape"), "it")
    if any(d is not None and d >= len(shape) for d in layout.dims):
        return
    coordinates = [tuple(min(c, n - 1) for n in layout.mesh) for c in (0, 1, 2)]
    for coordinate in coordinates:
        rank = layout.rank_at(coordinate)
        assert 0 <= rank < world
        assert layout.coordinate(rank) == coordinate, "two ranks at one place"
        box = layout.box(shape, coordinate)
        assert all(o + n <= of for o, n, of in zip(box.offset, box.shape, shape, strict=True))
        layout.replica(coordinate), layout.replica_set(rank)
        stretch = Stretch({"w": max(1, 4 * _product(shape)), "v": 100_000}, layout.num_replicas)
        rows = box.shape[0] if box.shape else 1
        for replica, first, last in islice(stretch.holders("w", box, 0, rows), MOST_READS):
            assert 0 <= replica < layout.num_replicas
            assert 0 <= first <= last <= rows
        sum(1 for _ in islice(layout.overlapping(shape, box), MOST_READS))
    assert Layout.from_json(layout.to_json(), world, "it") == layout


def _product(shape):
    total = 1
    for n in shape:
        total *= n
    return total


def spell_shard(tree, rng):
    """Length, header with metadata as a text in it, and behind it the length of the file."""
    if not isinstance(tree, dict) or not isinstance(tree.get("entries"), dict):
        return spell(tree).encode()
    entries, draw = dict(tree["entries"]), rng.random()
    metadata = tree.get("metadata")
    text = spell(metadata) if draw < 0.95 else metadata
    entries["__metadata__"] = {"trainckpt": text}
    head = spell(entries).encode()
    data_bytes = _end(entries) if rng.random() < 0.9 else tree.get("data_bytes")
    length = len(head) if rng.random() < 0.97 else int(rng.random() * 2**34)
    data_bytes = data_bytes if type(data_bytes) is int else 0
    file_bytes = min(max(8 + len(head) + data_bytes, 0), 2**64 - 1)
    return length.to_bytes(8, "little") + head + file_bytes.to_bytes(8, "little")


def _end(entries):
    ends = [0]
    for entry in entries.values():
        places = entry.get("data_offsets") if isinstance(entry, dict) else None
        if isinstance(places, list) and len(places) == 2 and type(places[1]) is int:
            ends.append(places[1])
    return max(ends)


def run_shard(data):
    head, file_bytes = data[:-8], int.from_bytes(data[-8:], "little")
    length = shard_file.header_length(head, "it")
    header = shard_file.parse(head[:length], "it", file_bytes=file_bytes)
    assert header.data_bytes == file_bytes - len(head[:length])
    regions = {region.key: region for region in header.regions}
    for file in header.references.values():
        name, rank = reached_file(file)
        assert file == f"{name}/rank{rank:05d}.safetensors", "a path that is spelled in another way"
    for region in header.regions[:20]:
        entry = manifests.TensorEntry(region.dtype, region.of)
        begin, end = span(region.box, region.box, region.dtype)
        assert 0 <= begin <= end <= region.num_bytes
        for read in (RegionRead(0, region.tensor, region.box), RegionRead(0, region.tensor)):
            try:
                held = find(read, entry, regions, "it")
            except TrainckptError:
                continue
            assert held.tensor == region.tensor


def run_cursor(data):
    found = Cursor.from_json(json_io.parse(data, "it", max_bytes=1 << 20))
    assert all(0 <= n < 2**63 for n in found.to_json().values()), "a cursor out of range"
    assert Cursor.from_json(found.to_json()) == found
    SnapshotName(1, 1, found.step, found.micro), str(found), found.place()


_CURSOR = Cursor(1, 12, 3, 7, 51, 204).to_json()
_LAYOUTS = [
    {"mesh": [2, 2], "strides": [2, 1], "base": 0, "dims": [-1, 0], "order": [0, 1]},
    {"mesh": [4], "strides": [1], "base": 0, "dims": [-1], "order": [0]},
    {"mesh": [2, 2], "strides": [1, 2], "base": 0, "dims": [0, 0], "order": [1, 0]},
]
_TENSORS = {
    "w": ["F32", [70000, 3], 0],
    "b": ["BF16", [], 1],
    "g": ["U8", [9], "rank"],
    "e": ["F64", [0, 5], 1],
    "s": ["F32", [101, 400], 2],
}
_COMMON = {
    "algorithm": "xxh3_128",
    "kind": "snapshot",
    "run": "run",
    "id": "s12m3",
    "attempt": 2,
    "sequence": 7,
    "parent": "s8~1.4",
    "cursor": _CURSOR,
    "window": _CURSOR,
    "created": 1.5,
    "tags": ["best"],
    "reason": "SIGTERM",
    "fingerprint": {"torch": "2"},
    "writer": "x",
}
MANIFEST_2 = {
    **_COMMON,
    "format": 2,
    "world": 4,
    "layouts": _LAYOUTS,
    "tensors": _TENSORS,
    "files": {"bytes": [5, 6, 7, 8], "digests": D * 4, "headers": D * 4},
}
OLDER = "s8~1.4/rank00000.safetensors"
_REACHED = {
    "names": [OLDER, "s9~2.6/rank00003.safetensors"],
    "bytes": [7, 8],
    "digests": D * 2,
    "headers": D * 2,
}
MANIFEST_3 = {**MANIFEST_2, "format": 3, "reached": _REACHED}
MANIFEST_5 = {
    **MANIFEST_2,
    "format": 5,
    "files": {"bytes": [5, 6, 7, 8], "headers": D * 4},
    "reached": {"names": [OLDER], "bytes": [7], "headers": D},
}
MANIFEST_1 = {
    **_COMMON,
    "format": 1,
    "world": 2,
    "tensors": {"w": ["F32", [70000, 3], "split"], "g": ["U8", [9], "rank"]},
    "files": [
        {"name": f"rank0000{i}.safetensors", "bytes": 9, "digest": D, "header": D} for i in range(2)
    ],
}
EMPTY_1 = {**_COMMON, "format": 1, "world": 0, "files": [], "tensors": {"w": ["F32", [2], "split"]}}
_WORDS = (
    *MANIFEST_2,
    *_CURSOR,
    *_LAYOUTS[0],
    *_TENSORS,
    "bytes",
    "digests",
    "headers",
    "name",
    "digest",
    "header",
    "split",
    "rank",
    "F32",
    "U8",
    "BF16",
    D,
    D * 3,
    *_REACHED["names"],
    "reached",
    "names",
    "../x",
    "s12m3~2.7/rank00000.safetensors",
)


def _shard(**facts):
    places = {
        "w": ([4, 3], None),
        "v[2:4]": ([2, 3], {"tensor": "v", "offset": [2, 0], "of": [8, 3]}),
    }
    entries, at = {}, 0
    for key, (shape, _) in places.items():
        size = 4 * _product(shape)
        entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    entries["z"] = {"dtype": "U8", "shape": [8], "data_offsets": [at, at + 8]}
    metadata = {
        "format": 2,
        "rank": 0,
        "world": 4,
        "digest": "xxh3_128",
        "dtypes": {"z": "complex64"},
        "digests": dict.fromkeys(entries, D),
        "regions": {"v[2:4]": places["v[2:4]"][1]},
        **facts,
    }
    return {"entries": entries, "metadata": metadata, "data_bytes": at + 8}


_SHARD_WORDS = (
    "dtype",
    "shape",
    "data_offsets",
    "F32",
    "U8",
    "w",
    "v[2:4]",
    "v",
    "z",
    D,
    "format",
    "rank",
    "world",
    "digests",
    "regions",
    "dtypes",
    "tensor",
    "offset",
    "of",
    "__metadata__",
    "entries",
    "metadata",
    "complex64",
    "references",
    OLDER,
    "../x",
    "u[0:2]",
)

PARSERS = {
    "manifest": Parser(
        "manifest",
        run_manifest,
        [MANIFEST_5, MANIFEST_3, MANIFEST_2, MANIFEST_1, EMPTY_1],
        sealed,
        _WORDS,
        REFUSALS,
    ),
    "layout": Parser(
        "layout",
        run_layout,
        [{"layout": layout, "world": 4, "shape": [70000, 3]} for layout in _LAYOUTS],
        as_json,
        ("layout", "world", "shape", *_LAYOUTS[0]),
        REFUSALS,
    ),
    "shard": Parser(
        "shard",
        run_shard,
        [_shard(), _shard(format=3, references={OLDER: ["u[0:2]", "x"]})],
        spell_shard,
        _SHARD_WORDS,
        REFUSALS,
    ),
    "cursor": Parser("cursor", run_cursor, [_CURSOR], as_json, tuple(_CURSOR), REFUSALS),
}
