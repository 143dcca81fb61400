"""Shard files: laid out, built, parsed; hostile headers are refused before any memory is taken."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import shard_file
from trainckpt.format.digest import PLACEHOLDER, digest
from trainckpt.format.shard_file import ITEM_BYTES, PAGE_BYTES, Region, ShardHeader

DIGEST = digest(b"x")
OLDER = "s2~1.1/rank00000.safetensors"
ESCAPES = 12  # most bytes that an escaped character of a name is counted with, and does not take
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def headers(draw):
    """A header with any mix of types, shapes and cuts."""
    regions = []
    for number in range(draw(st.integers(0, 6))):
        name = f"t{number}" + draw(st.sampled_from(["", "ü", "\\", '"', "\x00", "\U0001f600"]))
        of = draw(SHAPES)
        offset, shape = (0,) * len(of), of
        if of and of[0] > 1 and draw(st.booleans()):
            first = draw(st.integers(0, of[0] - 1))
            last = draw(st.integers(first + 1, of[0]))
            offset, shape = (first, *offset[1:]), (last - first, *of[1:])
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        true = draw(st.sampled_from(["", "complex128"])) if dtype == "U8" else ""
        regions.append(Region(name, dtype, offset, shape, of, true))
    older = st.sampled_from([OLDER, "s3m1~1.2/rank00000.safetensors"])
    references = draw(st.dictionaries(st.sampled_from(["w", "v[0:2]", "ü"]), older))
    laid_out = shard_file.lay_out(regions)
    header = ShardHeader(draw(st.integers(0, 9)), 10, laid_out, references=references)
    return shard_file.reserve(header)


@given(headers())
def test_what_was_built_is_parsed(header):
    header = shard_file.with_digests(
        header, {r.key: digest(r.key.encode()) for r in header.regions}
    )
    head = shard_file.build(header)
    found = shard_file.parse(head, "x", file_bytes=len(head) + header.data_bytes)
    expected = [r.digested(header.digests_of(r)) for r in header.regions]
    assert sorted(found.regions, key=str) == sorted(expected, key=str)
    assert (found.rank, found.world, found.header_bytes) == (header.rank, 10, len(head))
    assert found.references == header.references
    assert (b'\\"format\\":3' in head) == bool(header.references)


@given(headers())
def test_data_begins_at_a_page_and_digests_do_not_move_it(header):
    head = shard_file.build(header)
    filled = shard_file.with_digests(header, {r.key: DIGEST for r in header.regions})
    assert len(head) % PAGE_BYTES == 0
    assert len(shard_file.build(filled)) == len(head) == shard_file.header_length(head, "x")


@given(headers())
def test_less_than_a_page_more_is_reserved_than_the_header_takes(header):
    text = shard_file.build(header).rstrip(b" ")
    most_shorter = 2 * len(str(header.data_bytes)) * len(header.regions)  # of the offsets
    assert header.header_bytes - PAGE_BYTES < len(text) + most_shorter + ESCAPES * len(
        header.regions
    )


def test_a_header_that_outgrows_its_place_is_refused():
    region = Region("w", "U8", (0,), (5,), (5,))
    header = shard_file.reserve(ShardHeader(0, 1, (region,)))
    with pytest.raises(UnusableSnapshot, match="room"):
        shard_file.build(shard_file.with_digests(header, {"w": DIGEST * 200}))


@given(headers())
def test_every_region_is_aligned_to_its_items_without_a_gap(header):
    at = 0
    for region in header.regions:
        assert region.first_byte == at
        assert region.first_byte % ITEM_BYTES[region.dtype] == 0
        at += region.num_bytes
    assert at == header.data_bytes


def test_two_regions_of_one_name_are_refused_before_they_are_written():
    """A tensor may be called as a part of another one would be."""
    part = Region("w", "U8", (0,), (5,), (9,))
    with pytest.raises(UnusableSnapshot, match=r"w\[0:5\]"):
        shard_file.lay_out([part, Region("w[0:5]", "U8", (0,), (3,), (3,))])


def hostile(entries, file_bytes=None, **facts):
    """A shard header with these entries, digests made to fit; parsed."""
    ours = {
        "format": 1,
        "rank": 0,
        "world": 1,
        "regions": {},
        "dtypes": {},
        "digests": dict.fromkeys(entries, PLACEHOLDER),
        **facts,
    }
    body = {"__metadata__": {"trainckpt": json.dumps(ours)}, **entries}
    text = json.dumps(body).encode()
    head = len(text).to_bytes(8, "little") + text
    return shard_file.parse(head, "x", file_bytes=len(head) + (file_bytes or 0))


def entry(first, last, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": shape or [last - first], "data_offsets": [first, last]}


def test_the_hostile_header_of_these_tests_is_otherwise_fine():
    assert len(hostile({"a": entry(0, 4), "b": entry(4, 9)}, 9).regions) == 2


@pytest.mark.parametrize(
    ("entries", "file_bytes"),
    [
        ({"a": entry(0, 10)}, 9),  # beyond the file
        ({"a": entry(0, 4)}, 9),  # bytes nobody owns
        ({"a": entry(0, 4), "b": entry(3, 9)}, 9),  # overlapping
        ({"a": entry(0, 4), "b": entry(5, 9)}, 9),  # a gap
        ({"a": entry(-4, 4)}, 8),
        ({"a": entry(8, 4, [4])}, 8),
        ({"a": entry(0, 8, [2**62, 2**62])}, 8),  # more than there is memory
        ({"a": entry(0, 8, [-8])}, 8),
        ({"a": entry(0, 8, [8.0])}, 8),
        ({"a": entry(0, 8, [1] * 65)}, 8),
        ({"a": entry(0, 8, [8], "F99")}, 8),
        ({"a": entry(0, 8, [8], ["U8"])}, 8),
        ({"a": []}, 8),
        ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0]}}, 8),
    ],
)
def test_a_region_that_does_not_fit_the_file_is_refused(entries, file_bytes):
    with pytest.raises(UnusableSnapshot):
        hostile(entries, file_bytes)


@pytest.mark.parametrize(
    "facts",
    [
        {"format": 4},
        {"format": 3},
        {"format": 3, "references": ["w"]},
        {"format": 3, "references": {OLDER: "w"}},
        {"format": 3, "references": {OLDER: [3]}},
        {"format": 3, "references": {OLDER: ["a"]}},  # it is here as well
        {"format": 3, "references": {OLDER: ["w", "w"]}},
        {"format": 3, "references": {OLDER: ["w"], OLDER.replace("s2", "s3"): ["w"]}},
        {"format": 3, "references": {"../" + OLDER: ["w"]}},
        {"format": 3, "references": {"s2~1.1/manifest.json": ["w"]}},
        {"format": True},
        {"format": None},
        {"rank": -1},
        {"regions": []},
        {"regions": {"a": {"tensor": "w", "offset": [5], "of": [8]}}},  # 5 + 8 > 8
        {"regions": {"a": {"tensor": "w", "offset": [0, 0], "of": [8]}}},
        {"regions": {"a": {"tensor": 3, "offset": [0], "of": [8]}}},
        {"regions": {"a": "w"}},
        {"digests": {}},
        {"digests": {"a": "Z" * 32}},
        {"dtypes": {"a": 3}},
    ],
)
def test_our_own_facts_are_checked_too(facts):
    with pytest.raises(UnusableSnapshot):
        hostile({"a": entry(0, 8)}, 8, **facts)


@given(st.binary(max_size=64))
def test_any_first_bytes_are_read_or_refused(data):
    try:
        length = shard_file.header_length(data, "x")
        shard_file.parse(data[:length], "x", file_bytes=len(data))
    except UnusableSnapshot:
        pass


def test_deep_nesting_is_refused_and_not_a_crash():
    text = b"[" * 200_000
    with pytest.raises(UnusableSnapshot):
        shard_file.parse(len(text).to_bytes(8, "little") + text, "x", file_bytes=1 << 20)


def test_a_digested_region_is_the_same_but_for_its_digest():
    region = Region("t", "F32", (2, 0), (3, 4), (9, 4), "", 96)
    assert region.key == "t[2:5]"
    found = region.digested("0f" * 16)
    assert found == replace(region, digest="0f" * 16)
    assert (found.key, found.num_bytes, found.bytes_per_digest) == ("t[2:5]", 48, 48)
    assert region.digest == ""
