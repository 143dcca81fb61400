"""Manifests: read back as written; anything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format import manifest as manifests
from trainckpt.format.cursor import Cursor
from trainckpt.format.digest import digest
from trainckpt.format.layout import replicated
from trainckpt.format.manifest import FileEntry, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName

D = digest(b"d")
MANIFEST = Manifest(
    "run",
    SnapshotName(2, 7, 12, 3),
    "s8~1.4",
    Cursor(1, 12, 3, 7, 51, 204),
    2,
    (FileEntry("rank00000.safetensors", 5000, D, D), FileEntry("rank00001.safetensors", 1, D, D)),
    {"w": TensorEntry("F32", (2, 3), replicated(2)), "b": TensorEntry("BF16", ())},
    1.5,
    tags=("best",),
    reason="SIGTERM",
    fingerprint={"torch": "2", "threads": 1},
)


def with_changes(**changes):
    """The manifest's bytes with some fields changed and its own digest made to fit."""
    body = json.loads(manifests.dump(MANIFEST))
    del body["digest"]
    for key, value in changes.items():
        if value is KeyError:
            del body[key]
        else:
            body[key] = value
    body["digest"] = digest(json_io.canonical(body))
    return json_io.canonical(body)


def test_it_comes_back_as_it_was():
    assert manifests.load(manifests.dump(MANIFEST), "x") == MANIFEST
    assert MANIFEST.num_bytes == 5001


def test_older_files_it_refers_to_come_back_and_only_then_the_version_is_a_newer_one():
    older = (
        FileEntry("s8~1.4/rank00000.safetensors", 7, D, D),
        FileEntry("s9~2.6/rank00001.safetensors", 8, D, D),
    )
    referring = replace(MANIFEST, reached=older)
    assert manifests.load(manifests.dump(referring), "x") == referring
    assert (referring.num_bytes, referring.reached_bytes) == (5001, 15)
    formats = [json.loads(manifests.dump(m))["format"] for m in (MANIFEST, referring)]
    assert formats == [2, 3]
    assert "reached" not in json.loads(manifests.dump(MANIFEST))


def test_without_digests_of_whole_files_it_is_version_5_and_has_none_of_older_files_either():
    files = tuple(replace(file, digest="") for file in MANIFEST.files)
    plain = replace(MANIFEST, files=files)
    older = (FileEntry("s8~1.4/rank00000.safetensors", 7, D, D),)
    referring = replace(plain, reached=older)
    assert manifests.load(manifests.dump(plain), "x") == plain
    found = manifests.load(manifests.dump(referring), "x")
    assert found == replace(referring, reached=(replace(older[0], digest=""),))
    assert manifests.load(manifests.dump(found), "x") == found
    for manifest in (plain, referring):
        body = json.loads(manifests.dump(manifest))
        assert body["format"] == 5
        assert "digests" not in {**body["files"], **body.get("reached", {})}


def test_what_died_with_ranks_comes_back_and_is_said():
    left = replace(MANIFEST, lost=(1,), carried=True)
    assert manifests.load(manifests.dump(left), "x") == left
    assert left.not_bitwise[0] == "rank 1 died with all that was its own"
    assert len(left.not_bitwise) == 2
    assert MANIFEST.not_bitwise == []
    assert not {"lost", "carried"} & json.loads(manifests.dump(MANIFEST)).keys()
    for lost in ([2], [-1], ["1"], 1):
        with pytest.raises(UnusableSnapshot, match="not ranks that were lost"):
            manifests.load(with_changes(lost=lost), "x")


def test_every_flipped_bit_is_found():
    data = manifests.dump(MANIFEST)
    for bit in range(0, len(data) * 8, 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnusableSnapshot):
            manifests.load(bytes(flipped), "x")


def test_every_truncation_is_found():
    data = manifests.dump(MANIFEST)
    for length in range(0, len(data), 11):
        with pytest.raises(UnusableSnapshot):
            manifests.load(data[:length], "x")


def test_a_newer_format_says_so_and_what_to_do():
    with pytest.raises(UnusableSnapshot, match="format version 6") as caught:
        manifests.load(with_changes(format=6), "x")
    assert "the release of trainckpt that wrote it" in caught.value.hint


FILE = {"name": "a", "bytes": 1, "digest": D, "header": D}
FILES = {"bytes": [1, 2], "digests": D * 2, "headers": D * 2}
REACHED = {"names": ["s8~1.4/rank00000.safetensors"], "bytes": [7], "digests": D, "headers": D}
LAYOUT = {"mesh": [2], "strides": [1], "base": 0, "dims": [-1], "order": [0]}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1, "files": [{**FILE, "name": "../../etc/passwd"}, FILE]},
        {"format": 1, "files": [{**FILE, "name": ".."}, FILE]},
        {"format": 1, "files": [{**FILE, "name": "/etc/passwd"}, FILE]},
        {"format": 1, "files": [{**FILE, "bytes": -1}, {**FILE, "name": "b"}]},
        {"format": 1, "files": [{**FILE, "bytes": 2**70}, {**FILE, "name": "b"}]},
        {"format": 1, "files": [{**FILE, "digest": "0"}, {**FILE, "name": "b"}]},
        {"format": 1, "files": [FILE, FILE]},  # one file twice
        {"format": 1, "files": [FILE]},  # for two ranks
        {"format": 1, "files": {}},
        {"format": 1, "files": ["a", "b"]},
        {"files": []},
        {"files": {**FILES, "bytes": [1]}},
        {"files": {**FILES, "bytes": [1, -1]}},
        {"files": {**FILES, "bytes": [1, True]}},
        {"files": {**FILES, "digests": D}},
        {"files": {**FILES, "headers": "Z" * 64}},
        {"layouts": {}},
        {"layouts": []},  # a tensor refers to the first
        {"layouts": [{**LAYOUT, "mesh": [3]}]},  # of two ranks
        {"layouts": [{**LAYOUT, "base": 1}]},
        {"layouts": [{**LAYOUT, "strides": [0]}]},  # one rank twice
        {"layouts": [{**LAYOUT, "order": [1]}]},
        {"layouts": [{**LAYOUT, "order": []}]},
        {"layouts": [{**LAYOUT, "dims": [-2]}]},
        {"layouts": [{**LAYOUT, "dims": [2]}]},  # of a matrix
        {"layouts": [{**LAYOUT, "dims": ["0"]}]},
        {"layouts": [{**LAYOUT, "mesh": [0]}]},
        {"layouts": [{**LAYOUT, "mesh": [], "strides": [], "dims": [], "order": []}]},
        {"format": 3},
        {"format": 3, "reached": []},
        *[
            {"format": 3, "reached": {**REACHED, "names": [name]}}
            for name in (
                "../x",
                "/etc/passwd",
                "s8~1.4/../x",
                "s8~1.4/rank0.safetensors",
                "s8~1.4",
                3,
                "s8~1.4/manifest.json",
                "s08~1.4/rank00000.safetensors",
                "",
                "s8~1.4/rank00000.safetensors/x",
                "snapshots/s8~1.4/rank00000.safetensors",
                "s12m3~2.7/rank00000.safetensors",
                "s13~2.8/rank00000.safetensors",
                "s8~1.4/rank000001.safetensors",
                "s8~1.4/rank0000\u0661.safetensors",
            )
        ],
        {"format": 3, "reached": {**REACHED, "names": REACHED["names"] * 2}},
        {
            "format": 3,
            "reached": {
                **REACHED,
                "names": REACHED["names"] * 2,
                "bytes": [7, 7],
                "digests": D * 2,
                "headers": D * 2,
            },
        },
        {"format": 3, "reached": {**REACHED, "bytes": [-7]}},
        {"format": 3, "reached": {**REACHED, "digests": ""}},
        {"window": {"step": 1}},
        {"window": 3},
        {"world": -1},
        {"world": True},
        {"tensors": {"w": ["F32", [2, -3], 0]}},
        {"tensors": {"w": ["F32", [2], 1]}},
        {"tensors": {"w": ["F32", [2], True]}},
        {"tensors": {"w": ["F32", [2], "split"]}},
        {"tensors": {"w": ["F33", [2], 0]}},
        {"tensors": {"w": ["F32", "x", "rank"]}},
        {"tensors": {"w": 3}},
        {"cursor": {"step": 1}},
        {"tags": "best"},
        {"run": 3},
        {"attempt": "2"},
        {"fingerprint": []},
        {"created": "now"},
        {"kind": None},
        {"reason": KeyError},
        {"cursor": KeyError},
        {"format": KeyError},
    ],
)
def test_a_field_that_cannot_be_is_refused(change):
    with pytest.raises(UnusableSnapshot):
        manifests.load(with_changes(**change), "x")


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"null", b"[" * 100_000, b'{"format":1}'])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(UnusableSnapshot):
        manifests.load(data, "x")


FIELDS = st.sampled_from(sorted(json.loads(manifests.dump(MANIFEST))))
ANYTHING = st.none() | st.integers() | st.text() | st.lists(st.integers())


@given(st.dictionaries(FIELDS, ANYTHING))
def test_any_fields_are_read_or_refused(changes):
    """Whatever stands in it, with a digest that fits: a manifest, or `UnusableSnapshot`."""
    try:
        manifests.load(with_changes(**changes), "x")
    except UnusableSnapshot:
        pass
