"""Shard files: one rank's part of a snapshot, laid out as one plain safetensors file.

    8 bytes        length of the header, little-endian
    header         JSON, padded with spaces so that the data begins at a multiple of 4096
    data           the regions, back to back: first those that fill whole pages, then those that
                   fill whole cache lines, then larger item sizes first: no gap, nothing behind

Our own facts stand in the header's `__metadata__`, under the key `trainckpt`, as a JSON string:
the digests of every region, which part of which tensor a region is where it is not the whole
one, and the true type of what safetensors has no type for (stored as bytes). Digests have a
fixed width, so a header is laid out before the data is there and filled in afterwards. A large
region has one for each block of it, so that a part can be read and verified by itself.

Regions whose bytes an older shard file of the rank holds already are not written again: under
`references` stands which file that is. What the region is, where it lies and its digests stand in
that file's own header, once.

Pure: lays out, builds and parses bytes; opens nothing. Used by: state (to fill), snapshot.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, names, strict, versions
from trainckpt.format.layout import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PAGE_BYTES, LINE_BYTES = 4096, 64
SMALL_BYTES = 64 << 10  # what has fewer lies side by side
MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
METADATA_KEY = "trainckpt"
MIN_BLOCK_BYTES, MAX_BLOCKS = 8192, 256

# safetensors type -> item size in bytes. What is missing here is stored as U8.
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """A box of elements of one tensor, and where its bytes lie in a shard file's data.

    Attributes:
        tensor: Name of the tensor.
        dtype: safetensors type name, such as "F32".
        offset: First element of the box in each dimension of the whole tensor.
        shape: Extent of the box, in elements.
        of: Shape of the whole tensor.
        true_dtype: The element type where `dtype` is only its bytes ("complex128"), else "".
        first_byte: Of the region, counted from the data's beginning.
        digest: Of each block of the region's bytes (`block_bytes`), one after the other; a file
            of format 1 has one for the whole.
    """

    tensor: str
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    of: tuple[int, ...]
    true_dtype: str = ""
    first_byte: int = 0
    digest: str = ""

    @property
    def box(self) -> Box:
        """The elements it holds."""
        return Box(self.offset, self.shape)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return num_bytes(self.of, self.dtype)

    @property
    def num_blocks(self) -> int:
        """Digests of a region of this size."""
        return max(1, -(-self.num_bytes // block_bytes(self.num_bytes)))

    @property
    def bytes_per_digest(self) -> int:
        """Bytes that have a digest of their own; a file of format 1 has one for all."""
        size = self.num_bytes
        return block_bytes(size) if len(self.digest) > digest.NUM_HEX else size

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return num_bytes(self.shape, self.dtype)

    @property
    def is_whole(self) -> bool:
        """True if the region is the whole tensor."""
        return self.shape == self.of

    @cached_property
    def key(self) -> str:
        """The region's name in the safetensors header."""
        return region_key(self.tensor, self.offset, self.shape, self.of)

    def digested(self, found: str) -> Region:
        """The same with this digest; what was worked out of it (`key`) need not be again."""
        region = object.__new__(Region)
        region.__dict__.update(self.__dict__, digest=found)
        return region


def region_key(
    tensor: str, offset: tuple[int, ...], shape: tuple[int, ...], of: tuple[int, ...]
) -> str:
    """What a region is called in the safetensors header: `w`, `w[0:5]`, `w[0:5,2:4]`."""
    if shape == of:
        return tensor
    cut = max(d for d, (n, m) in enumerate(zip(shape, of, strict=True)) if n != m)
    bounds = zip(offset[: cut + 1], shape, strict=False)
    return f"{tensor}[{','.join(f'{o}:{o + n}' for o, n in bounds)}]"


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of so many elements."""
    return prod(shape) * ITEM_BYTES[dtype]


def block_bytes(region_bytes: int) -> int:
    """Bytes of one block of a region: 8 KiB, doubled until a region has at most 256."""
    size = MIN_BLOCK_BYTES
    while size * MAX_BLOCKS < region_bytes:
        size *= 2
    return size


@dataclass(frozen=True)
class ShardHeader:
    """Everything a shard file says of itself.

    Attributes:
        rank: The rank that wrote the file.
        world: Ranks of the attempt that wrote it.
        regions: In the order of their bytes.
        header_bytes: Length of the 8-byte prefix and the padded header: where the data begins.
        references: Key of a region that is not here -> the older shard file that holds it, as
            `names.reached_file` reads it.
    """

    rank: int
    world: int
    regions: tuple[Region, ...]
    header_bytes: int = field(default=0, compare=False)
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.num_bytes for region in self.regions)


def lay_out(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Give each region its place: whole pages, whole lines, item sizes descending; then the small
    ones, then names.

    So every region is aligned to its item size without padding, and a large one most often to a
    page: it can become a live tensor where it is read to. Small ones lie side by side: they are
    copied together.

    Raises:
        UnusableSnapshot: two regions have one key, so one would hide the other in the header.
    """
    ordered = sorted(regions, key=_place_of)
    placed, first_byte = [], 0
    seen: set[str] = set()
    for region in ordered:
        if region.key in seen:
            raise UnusableSnapshot(f"two tensors would both be stored as {region.key[:100]}")
        seen.add(region.key)
        placed.append(_moved(region, first_byte))
        first_byte += region.num_bytes
    return tuple(placed)


def _place_of(region: Region) -> tuple[int, int, bool, str]:
    is_large = region.num_bytes >= SMALL_BYTES
    return _raggedness(region), -ITEM_BYTES[region.dtype], is_large, region.key


def _raggedness(region: Region) -> int:
    """0 if what follows the region begins at a page as it does, 1 at a cache line, else 2."""
    return (region.num_bytes % PAGE_BYTES > 0) + (region.num_bytes % LINE_BYTES > 0)


def build(header: ShardHeader) -> bytes:
    """The file's first bytes: length, header, padding. Same length for any digests, or none."""
    entries: dict[str, Any] = {"__metadata__": {METADATA_KEY: _metadata(header)}}
    for region in header.regions:
        last_byte = region.first_byte + region.num_bytes
        entries[region.key] = {
            "dtype": region.dtype,
            "shape": list(region.shape),
            "data_offsets": [region.first_byte, last_byte],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UnusableSnapshot(f"a header of {len(text)} bytes is more than safetensors reads")
    return len(text).to_bytes(8, "little") + text


def header_length(prefix: bytes | bytearray | memoryview, what: str) -> int:
    """Bytes of prefix and header together, from the file's first 8 bytes."""
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise UnusableSnapshot(f"{what} does not begin with the length of a safetensors header")
    return 8 + length


def parse(head: bytes | memoryview, what: str, *, file_bytes: int | None) -> ShardHeader:
    """Read the first bytes of a shard file back into a `ShardHeader`.

    Args:
        head: Prefix and header, as `header_length` says.
        what: Names the file in errors.
        file_bytes: Length of the whole file; every region must lie inside it. None: it may be
            written just now.

    Raises:
        UnusableSnapshot: anything is missing, of a wrong type, overlapping or out of bounds.
    """
    entries = strict.parse(head[8:], f"the header of {what}", max_bytes=MAX_HEADER_BYTES)
    metadata = strict.field(entries, "__metadata__", dict, what)
    facts = strict.parse(
        strict.field(metadata, METADATA_KEY, str, what).encode(errors="surrogatepass"),
        f"the metadata of {what}",
        max_bytes=MAX_HEADER_BYTES,
    )
    version = facts.get("format") if isinstance(facts, dict) else None
    versions.check_version(version, what, versions.SHARD_FILES)
    partial = strict.field(facts, "regions", dict, what)
    types = strict.field(facts, "dtypes", dict, what)
    digests = strict.field(facts, "digests", dict, what)
    regions = [
        _parse_region(key, entry, partial.get(key), types.get(key, ""), digests.get(key), what)
        for key, entry in entries.items()
        if key != "__metadata__"
    ]
    references = _parse_references(facts, entries, what)
    regions.sort(key=lambda r: (r.first_byte, r.num_bytes))
    _check_places(regions, None if file_bytes is None else file_bytes - len(head), what)
    rank, world = strict.count(facts, "rank", what), strict.count(facts, "world", what)
    return ShardHeader(rank, world, tuple(regions), len(head), references)


def with_digests(header: ShardHeader, digests: Mapping[str, str]) -> ShardHeader:
    """The same header with the digest of each region filled in, by region key."""
    regions = tuple(r.digested(digests[r.key]) for r in header.regions)
    return replace(header, regions=regions)


def _moved(region: Region, first_byte: int) -> Region:
    return Region(
        region.tensor, region.dtype, region.offset, region.shape, region.of,
        region.true_dtype, first_byte,
    )  # fmt: skip


def _metadata(header: ShardHeader) -> str:
    facts: dict[str, Any] = {
        "format": versions.WRITTEN,
        "rank": header.rank,
        "world": header.world,
        "digest": digest.ALGORITHM,
        "digests": {r.key: r.digest or digest.PLACEHOLDER * r.num_blocks for r in header.regions},
        "regions": {
            r.key: {"tensor": r.tensor, "offset": r.offset, "of": r.of}
            for r in header.regions
            if not r.is_whole
        },
        "dtypes": {r.key: r.true_dtype for r in header.regions if r.true_dtype},
    }
    if header.references:
        by_file: dict[str, list[str]] = {}
        for key, file in sorted(header.references.items()):
            by_file.setdefault(file, []).append(key)
        facts.update({"format": versions.WITH_REFERENCES, "references": by_file})
    return strict.canonical(facts).decode()


def _parse_region(
    key: str, entry: Any, partial: Any, true_dtype: Any, found_digest: Any, what: str
) -> Region:
    where = f"{what}: {key[:100]}"
    dtype = strict.field(entry, "dtype", str, where)
    shape = strict.counts(strict.field(entry, "shape", list, where), where)
    places = strict.counts(strict.field(entry, "data_offsets", list, where), where)
    if dtype not in ITEM_BYTES or len(places) != 2 or type(true_dtype) is not str:
        raise UnusableSnapshot(f"{where}: type {dtype!r} with places {places} is not readable")
    tensor, offset, of = key, (0,) * len(shape), shape
    if partial is not None:
        tensor = strict.field(partial, "tensor", str, where)
        offset = strict.counts(strict.field(partial, "offset", list, where), where)
        of = strict.counts(strict.field(partial, "of", list, where), where)
    region = Region(tensor, dtype, offset, shape, of, true_dtype, places[0], found_digest)
    inside = len(offset) == len(shape) == len(of) and all(
        o + n <= whole for o, n, whole in zip(offset, shape, of, strict=True)
    )
    if not inside or places[1] - places[0] != region.num_bytes:
        raise UnusableSnapshot(f"{where}: its shape {shape} does not fit its place {places}")
    if not digest.are_digests(found_digest, {1, region.num_blocks}):
        raise UnusableSnapshot(f"{where} has no digest")
    return region


def _parse_references(
    facts: dict[str, Any], entries: Mapping[str, Any], what: str
) -> dict[str, str]:
    if facts["format"] < versions.WITH_REFERENCES:
        return {}
    found: dict[str, str] = {}
    for file, keys in strict.field(facts, "references", dict, what).items():
        names.reached_file(file)
        if type(keys) is not list or any(type(key) is not str for key in keys):
            raise UnusableSnapshot(f"{what}: what it refers to in {file} is not readable")
        found.update(dict.fromkeys(keys, file))
    listed = sum(len(keys) for keys in facts["references"].values())
    if len(found) != listed or not found.keys().isdisjoint(entries):
        raise UnusableSnapshot(f"{what} says of one region that it lies in two places")
    return found


def _check_places(regions: list[Region], data_bytes: int | None, what: str) -> None:
    at = 0
    for region in regions:
        if region.first_byte != at:
            raise UnusableSnapshot(f"{what}: {region.key[:100]} overlaps or leaves a gap")
        at += region.num_bytes
    if data_bytes is not None and at != data_bytes:
        raise UnusableSnapshot(f"{what} holds {data_bytes} bytes of data, its header names {at}")
