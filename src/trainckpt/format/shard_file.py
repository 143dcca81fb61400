"""Read and write the header of a shard file: one rank's part of a snapshot, in plain safetensors.

    8 bytes        length of the header, little-endian
    header         JSON, padded with spaces so that the data begins at a multiple of 4096
    data           the regions, back to back: first those that fill whole pages, then those that
                   fill whole cache lines, then larger item sizes first: no gap, nothing behind

Our own facts are in the header's `__metadata__`, under the key `trainckpt`, as a JSON string: the
digests of every region, the box of a partial one, and the true type of data
safetensors has no type for (stored as bytes). Digests have a fixed width, so a header is laid out
before the data exists and filled in afterwards. A large region has a digest for each of its
blocks, so a part can be read and verified by itself.

Regions with the same bytes in an older shard file of the rank are not written again: `references`
names that file. Its own header has their boxes, offsets and digests, once.

Pure: lays out, builds and parses bytes; opens nothing. Used by: state (to fill), snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest, json_io, names
from trainckpt.format.layout import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PAGE_BYTES, LINE_BYTES = 4096, 64
SMALL_BYTES = 64 << 10  # smaller regions are adjacent
MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
METADATA_KEY = "trainckpt"
MIN_BLOCK_BYTES, MAX_BLOCKS = 8192, 256

# safetensors type -> item size in bytes. Other types are stored as U8.
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class Region:
    """A box of elements of one tensor, and its place in a shard file's data.

    Attributes:
        tensor: Name of the tensor.
        dtype: safetensors type name, such as "F32".
        offset: First element of the box in each dimension of the whole tensor.
        shape: Extent of the box, in elements.
        of: Shape of the whole tensor.
        true_dtype: The element type where `dtype` is only its bytes ("complex128"), else "".
        first_byte: Of the region, counted from the data's beginning.
        digest: Of each block of the region's bytes (`block_bytes`), concatenated; a file of
            format 1 has one for the whole.
    """

    tensor: str
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    of: tuple[int, ...]
    true_dtype: str = ""
    first_byte: int = 0
    digest: str = ""

    def __hash__(self) -> int:
        return hash(self.key)  # those of all fields would take as long as a small copy

    @property
    def box(self) -> Box:
        """Return its elements."""
        return Box(self.offset, self.shape)

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return num_bytes(self.of, self.dtype)

    @property
    def num_blocks(self) -> int:
        """Return the number of digests for a region of this size."""
        return max(1, -(-self.num_bytes // block_bytes(self.num_bytes)))

    @property
    def bytes_per_digest(self) -> int:
        """Return the bytes covered by each digest; in a file of format 1, all."""
        size = self.num_bytes
        return block_bytes(size) if len(self.digest) > digest.NUM_HEX else size

    @cached_property
    def num_bytes(self) -> int:
        """Return the bytes of the region."""
        return num_bytes(self.shape, self.dtype)

    @property
    def is_whole(self) -> bool:
        """Return True if the region is the whole tensor."""
        return self.shape == self.of

    @cached_property
    def key(self) -> str:
        """Return the region's name in the safetensors header."""
        return region_key(self.tensor, self.offset, self.shape, self.of)

    def digested(self, found: str) -> Region:
        """Return a copy with this digest; cached properties such as `key` are copied too."""
        return self.placed(self.first_byte, found)

    def placed(self, first_byte: int, found: str = "") -> Region:
        """Return a copy at this place, with this digest; as quick as `digested`."""
        region = object.__new__(Region)
        region.__dict__.update(self.__dict__, first_byte=first_byte, digest=found)
        return region

    @classmethod
    def whole(cls, tensor: str, dtype: str, shape: tuple[int, ...], true_dtype: str) -> Region:
        """Return the region of a whole tensor; several times as quick as the constructor."""
        region = object.__new__(cls)
        region.__dict__.update(
            tensor=tensor,
            dtype=dtype,
            offset=(0,) * len(shape),
            shape=shape,
            of=shape,
            true_dtype=true_dtype,
            first_byte=0,
            digest="",
            num_bytes=num_bytes(shape, dtype),
            key=tensor,
        )
        return region


def region_key(
    tensor: str, offset: tuple[int, ...], shape: tuple[int, ...], of: tuple[int, ...]
) -> str:
    """Return a region's name in the safetensors header: `w`, `w[0:5]`, `w[0:5,2:4]`."""
    if shape == of:
        return tensor
    cut = max(d for d, (n, m) in enumerate(zip(shape, of, strict=True)) if n != m)
    bounds = zip(offset[: cut + 1], shape, strict=False)
    return f"{tensor}[{','.join(f'{o}:{o + n}' for o, n in bounds)}]"


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor of this shape and type."""
    return prod(shape) * ITEM_BYTES[dtype]


def block_bytes(region_bytes: int) -> int:
    """Return the bytes of one block: 8 KiB, doubled until a region has at most 256 blocks."""
    size = MIN_BLOCK_BYTES
    while size * MAX_BLOCKS < region_bytes:
        size *= 2
    return size


@dataclass(frozen=True)
class ShardHeader:
    """The header of a shard file.

    Attributes:
        rank: The rank that wrote the file.
        world: Ranks of the attempt that wrote it.
        regions: In the order of their bytes.
        header_bytes: Length of the 8-byte prefix and the padded header: where the data begins.
        references: Key of a region stored elsewhere -> the older shard file, as
            `names.reached_file` reads it.
        digests: Digests of regions by key, in place of the regions' own: so the regions of one
            layout serve all saves.
    """

    rank: int
    world: int
    regions: tuple[Region, ...]
    header_bytes: int = field(default=0, compare=False)
    references: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict, compare=False)

    def digests_of(self, region: Region) -> str:
        """Return the digests of one of the regions, "" where they are not known yet."""
        return self.digests.get(region.key) or region.digest

    @cached_property
    def data_bytes(self) -> int:
        """Return the bytes of all regions."""
        return sum(region.num_bytes for region in self.regions)

    @cached_property
    def members(self) -> str:
        """Return the JSON members of all regions; they do not depend on digests."""
        # Dictionaries for tens of thousands of regions would start collections of garbage, each of
        # which stops training for some tenths of a second.
        shapes: dict[tuple[int, ...], str] = {}  # most tensors have one of a few
        texts = []
        for region in self.regions:
            shape, first, size = region.shape, region.first_byte, region.num_bytes
            if (text := shapes.get(shape)) is None:
                text = shapes[shape] = json_io.canonical(shape).decode()
            texts.append(
                f'{json_io.canonical_text(region.key)}:{{"dtype":"{region.dtype}","shape":{text},'
                f'"data_offsets":[{first},{first + size}]}}'
            )
        return ",".join(texts)


def lay_out(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Assign each region its place in the file.

    Order: regions of whole pages, then of whole cache lines, then others; item sizes descending;
    small ones first; then names. So every region is aligned to its item size without padding, and
    a large one usually to a page: it can become a live tensor where it is read. Small ones are
    adjacent, so they are copied together.

    Raises:
        UnusableSnapshot: two regions have one key, so one would hide the other in the header.
    """

    def place_of(region: Region) -> tuple[int, int, bool, str]:
        size = region.num_bytes
        raggedness = (size % PAGE_BYTES > 0) + (size % LINE_BYTES > 0)
        return raggedness, -ITEM_BYTES[region.dtype], size >= SMALL_BYTES, region.key

    placed, first_byte = [], 0
    seen: set[str] = set()
    for region in sorted(regions, key=place_of):
        if region.key in seen:
            raise UnusableSnapshot(f"two tensors would both be stored as {region.key[:100]}")
        seen.add(region.key)
        placed.append(region.placed(first_byte))
        first_byte += region.num_bytes
    return tuple(placed)


def reserve(header: ShardHeader) -> ShardHeader:
    """Return the header with `header_bytes` that suffice for it, whatever its digests.

    Training waits while a file is laid out, and to write the JSON takes several times as long as
    this sum of lengths. The sum is exact but for the offsets, which count with the most digits.
    """
    digits = len(str(header.data_bytes))
    of_dtypes = {dtype: len(f':{{"dtype":"{dtype}","shape":') for dtype in ITEM_BYTES}
    of_offsets = len(',"data_offsets":[,]},') + 2 * digits
    of_digest = len(r":\"\",")
    of_shapes: dict[tuple[int, ...], int] = {}
    size = len(
        json_io.canonical({"__metadata__": {METADATA_KEY: _metadata(header, with_digests=False)}})
    )
    for region in header.regions:
        shape = region.shape
        if (of_shape := of_shapes.get(shape)) is None:
            of_shape = of_shapes[shape] = len(json_io.canonical(shape))
        key = len(json_io.canonical_text(region.key))
        # In the metadata, JSON inside a string, each quote and backslash gets one more backslash.
        nested = key + 2 if key == len(region.key) + 2 else 2 * key
        size += key + of_dtypes[region.dtype] + of_shape + of_offsets
        size += nested + of_digest + digest.NUM_HEX * region.num_blocks
    return replace(header, header_bytes=8 + size + -(8 + size) % PAGE_BYTES)


def build(header: ShardHeader) -> bytes:
    """Return the file's first bytes: length, header, padding up to `header_bytes`.

    Digests may be missing.

    Raises:
        UnusableSnapshot: safetensors reads no header of this size, or too little is reserved.
    """
    metadata = json_io.canonical({"__metadata__": {METADATA_KEY: _metadata(header)}}).decode()
    text = (f"{metadata[:-1]},{header.members}}}" if header.members else metadata).encode()
    missing = header.header_bytes - 8 - len(text)
    if missing < 0:
        raise UnusableSnapshot(f"a header of {len(text)} bytes got room for {len(text) + missing}")
    text += b" " * missing
    if len(text) > MAX_HEADER_BYTES:
        raise UnusableSnapshot(f"a header of {len(text)} bytes is more than safetensors reads")
    return len(text).to_bytes(8, "little") + text


def header_length(prefix: bytes | bytearray | memoryview, what: str) -> int:
    """Return the bytes of prefix and header together, from the file's first 8 bytes."""
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise UnusableSnapshot(f"{what} does not begin with the length of a safetensors header")
    return 8 + length


def parse(head: bytes | memoryview, what: str, *, file_bytes: int | None) -> ShardHeader:
    """Parse the first bytes of a shard file.

    Args:
        head: Prefix and header, as `header_length` says.
        what: Names the file in errors.
        file_bytes: Length of the whole file; the regions must fill it exactly. None: the file may
            be incomplete.

    Raises:
        UnusableSnapshot: anything is missing, of a wrong type, overlapping or out of bounds.
    """
    entries = json_io.parse(head[8:], f"the header of {what}", max_bytes=MAX_HEADER_BYTES)
    metadata = json_io.field(entries, "__metadata__", dict, what)
    facts = json_io.parse(
        json_io.field(metadata, METADATA_KEY, str, what).encode(errors="surrogatepass"),
        f"the metadata of {what}",
        max_bytes=MAX_HEADER_BYTES,
    )
    version = facts.get("format") if isinstance(facts, dict) else None
    names.check_version(version, what, names.SHARD_FILES)
    partial = json_io.field(facts, "regions", dict, what)
    types = json_io.field(facts, "dtypes", dict, what)
    digests = json_io.field(facts, "digests", dict, what)
    regions = [
        _parse_region(
            key,
            entry,
            partial=partial.get(key),
            true_dtype=types.get(key, ""),
            found_digest=digests.get(key),
            what=what,
        )
        for key, entry in entries.items()
        if key != "__metadata__"
    ]
    references = _parse_references(facts, entries, what)
    regions.sort(key=lambda r: (r.first_byte, r.num_bytes))
    _check_places(regions, None if file_bytes is None else file_bytes - len(head), what)
    rank, world = json_io.count(facts, "rank", what), json_io.count(facts, "world", what)
    return ShardHeader(rank, world, tuple(regions), len(head), references)


def with_digests(header: ShardHeader, digests: Mapping[str, str]) -> ShardHeader:
    """Return the header with the digests of each region, by region key."""
    members = header.members
    header = replace(header, digests=digests)
    vars(header)["members"] = members  # spelled once for all saves of a layout
    return header


def _metadata(header: ShardHeader, *, with_digests: bool = True) -> str:
    """Return the JSON of our own facts. Without digests, it only tells how long the rest is."""
    facts: dict[str, Any] = {
        "format": names.WRITTEN,
        "rank": header.rank,
        "world": header.world,
        "digest": digest.ALGORITHM,
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
        facts.update({"format": names.WITH_REFERENCES, "references": by_file})
    texts = []
    for region in sorted(header.regions if with_digests else (), key=attrgetter("key")):
        digests = header.digests_of(region) or digest.PLACEHOLDER * region.num_blocks
        texts.append(f'{json_io.canonical_text(region.key)}:"{digests}"')
    members = {key: json_io.canonical(value) for key, value in facts.items()}
    members["digests"] = f"{{{','.join(texts)}}}".encode()
    return json_io.canonical_object(members).decode()


def _parse_region(
    key: str, entry: Any, *, partial: Any, true_dtype: Any, found_digest: Any, what: str
) -> Region:
    where = f"{what}: {key[:100]}"
    dtype = json_io.field(entry, "dtype", str, where)
    shape = json_io.counts(json_io.field(entry, "shape", list, where), where)
    places = json_io.counts(json_io.field(entry, "data_offsets", list, where), where)
    if dtype not in ITEM_BYTES or len(places) != 2 or type(true_dtype) is not str:
        raise UnusableSnapshot(f"{where}: type {dtype!r} with places {places} is not readable")
    inside = True
    if partial is None:
        region = Region.whole(key, dtype, shape, true_dtype)
    else:
        offset = json_io.counts(json_io.field(partial, "offset", list, where), where)
        of = json_io.counts(json_io.field(partial, "of", list, where), where)
        region = Region(
            tensor=json_io.field(partial, "tensor", str, where),
            dtype=dtype,
            offset=offset,
            shape=shape,
            of=of,
            true_dtype=true_dtype,
        )
        inside = len(offset) == len(shape) == len(of) and all(
            o + n <= whole for o, n, whole in zip(offset, shape, of, strict=True)
        )
    if not inside or places[1] - places[0] != region.num_bytes:
        raise UnusableSnapshot(f"{where}: its shape {shape} does not fit its place {places}")
    if not digest.are_digests(found_digest, {1, region.num_blocks}):
        raise UnusableSnapshot(f"{where} has no digest")
    return region.placed(places[0], found_digest)


def _parse_references(
    facts: dict[str, Any], entries: Mapping[str, Any], what: str
) -> dict[str, str]:
    if facts["format"] < names.WITH_REFERENCES:
        return {}
    found: dict[str, str] = {}
    for file, keys in json_io.field(facts, "references", dict, what).items():
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
