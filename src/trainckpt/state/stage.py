"""Stage: captured tensors -> one shard file in memory; and the way back, `Destination`.

Copying the regions to their final places is the only moment training waits for. The memory is
kept and used again by the next snapshot. Restored tensors are never bound to it.

`stream` copies nothing ahead: for a save that training waits for anyway, because it ends.
"""

from __future__ import annotations

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format import digest, shard_file, strict
from trainckpt.format.shard_file import Region, ShardHeader
from trainckpt.state.captured import VALUES, Captured, Saved
from trainckpt.state.values import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
MAX_VALUES_BYTES = 1 << 30
STREAM_BYTES = 16 << 20


@dataclass
class Shard:
    """One rank's shard file in memory: `head` then `data` are its exact bytes."""

    header: ShardHeader
    head: bytes
    data: memoryview
    memory: torch.Tensor  # owns `data`

    def blocks(self) -> Iterator[memoryview]:
        """The file's bytes, in order."""
        yield memoryview(self.head)
        if len(self.data):
            yield self.data

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return len(self.head) + len(self.data)


class TensorsChanged(SaveFailed):
    """Something wrote to live tensors while they were streamed: a worker, a thread."""


@dataclass
class Stream:
    """One rank's shard file, whose data is read from the live tensors when it is written.

    They must not change from `stream` until the last block was taken; if one does, `blocks`
    raises `TensorsChanged` instead of ending.
    """

    header: ShardHeader
    head: bytes
    sources: list[torch.Tensor]  # regions in the order of the file, rows of live tensors

    def blocks(self) -> Iterator[memoryview]:
        """The file's bytes, in order. Each block is gone when the next is taken.

        A thread fills one buffer while the caller writes the other.
        """
        yield memoryview(self.head)
        with ThreadPoolExecutor(1, "trainckpt-fill") as filler:
            chunks = self._chunks()
            following = filler.submit(next, chunks, None)
            while (chunk := following.result()) is not None:
                following = filler.submit(next, chunks, None)
                yield chunk

    @torch.no_grad()
    def _chunks(self) -> Iterator[memoryview]:
        size = min(STREAM_BYTES, self.header.data_bytes)
        buffers = itertools.cycle([_page_aligned(size), _page_aligned(size)])
        buffer, filled = next(buffers), 0
        for region, source in zip(self.header.regions, self.sources, strict=True):
            flat, done, seen = _flat(source), 0, xxhash.xxh3_128()
            while done < flat.numel():
                step = min(flat.numel() - done, buffer.numel() - filled)
                buffer[filled : filled + step].copy_(flat[done : done + step])
                seen.update(bytes_of(buffer[filled : filled + step]))
                done, filled = done + step, filled + step
                if filled == buffer.numel():
                    yield bytes_of(buffer)
                    buffer, filled = next(buffers), 0
            if seen.hexdigest() != region.digest:
                raise TensorsChanged(f"{region.tensor} changed while it was written")
        if filled:
            yield bytes_of(buffer)[:filled]


def describe(captured: Captured) -> list[Region]:
    """Every captured tensor as one whole region, values included; places not yet given."""
    text = strict.canonical(captured.values)
    captured.tensors[VALUES] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return [_whole(name, tensor) for name, tensor in captured.tensors.items()]


def group_digests(captured: Captured) -> dict[str, str]:
    """Group -> digest over name, type, shape and bytes of its tensors, sorted by name."""
    states: dict[str, Any] = {}
    for name in sorted(captured.groups):
        tensor = captured.tensors[name]
        state = states.setdefault(captured.groups[name], xxhash.xxh3_128())
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        state.update(bytes_of(tensor))
    return {group: state.hexdigest() for group, state in states.items()}


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor's type, shape and bytes."""
    facts = f"{tensor.dtype} {tuple(tensor.shape)};".encode()
    return digest.digest_blocks([facts, bytes_of(tensor)])


@torch.no_grad()
def stage(
    captured: Captured,
    regions: Iterable[Region],
    *,
    rank: int,
    world: int,
    memory: torch.Tensor | None = None,
) -> Shard:
    """Copy `regions` of the captured tensors to their places in one shard file.

    Args:
        captured: The live tensors.
        regions: What this rank stores, as the save plan decided.
        rank: Of this process.
        world: Ranks of the attempt.
        memory: Of an earlier shard, used again if it is large enough; its shard is then gone.
    """
    header = ShardHeader(rank, world, shard_file.lay_out(tuple(regions)))
    size = header.data_bytes
    if memory is None or memory.numel() < size:
        memory = _page_aligned(size)
    for region in header.regions:
        source = _rows(_as_stored(captured.tensors[region.tensor]), region)
        _place(memory, region).copy_(source)
    data = bytes_of(memory)[:size]
    digests = {
        r.key: digest.digest(data[r.first_byte : r.first_byte + r.num_bytes])
        for r in header.regions
    }
    header = shard_file.with_digests(header, digests)
    return Shard(header, shard_file.build(header), data, memory)


@torch.no_grad()
def stream(captured: Captured, regions: Iterable[Region], *, rank: int, world: int) -> Stream:
    """As `stage`, but nothing is copied before the file is written."""
    header = ShardHeader(rank, world, shard_file.lay_out(tuple(regions)))
    sources = [_rows(_as_stored(captured.tensors[r.tensor]), r) for r in header.regions]
    digests = {
        region.key: digest.digest(bytes_of(source))
        for region, source in zip(header.regions, sources, strict=True)
    }
    header = shard_file.with_digests(header, digests)
    return Stream(header, shard_file.build(header), sources)


class Destination:
    """Where a restore puts the regions it reads: fresh CPU memory, tensor by tensor."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._true: dict[str, str] = {}
        self._filled: dict[str, int] = {}

    def memory_for(self, region: Region) -> memoryview:
        """The bytes that `region` fills; only rows of a tensor, so always one block."""
        if region.tensor not in self._tensors:
            try:
                fresh = torch.empty(region.of, dtype=_DTYPES[region.dtype])
            except RuntimeError as error:  # more than there is, or than can be counted
                raise UnusableSnapshot(f"{region.tensor[:100]}: {str(error)[:200]}") from error
            self._tensors[region.tensor] = fresh
            self._true[region.tensor] = region.true_dtype
        tensor = self._tensors[region.tensor]
        if tuple(tensor.shape) != region.of or tensor.dtype != _DTYPES[region.dtype]:
            raise UnusableSnapshot(f"{region.tensor}: its regions do not belong together")
        row = tensor.stride(0) * tensor.element_size() if region.shape else 0
        first = region.offset[0] * row if region.shape else 0
        self._filled[region.tensor] = self._filled.get(region.tensor, 0) + region.num_bytes
        return bytes_of(tensor)[first : first + region.num_bytes]

    def finish(self) -> Saved:
        """The saved state, once every region has been read; raises if a part is missing."""
        for name, tensor in self._tensors.items():
            if self._filled[name] != tensor.numel() * tensor.element_size():
                raise UnusableSnapshot(f"{name}: a part of it is missing")
        if VALUES not in self._tensors:
            raise UnusableSnapshot("the snapshot holds no values")
        raw = bytes_of(self._tensors.pop(VALUES))
        parsed = strict.parse(raw, "the values", max_bytes=MAX_VALUES_BYTES)
        if not isinstance(parsed, dict):
            raise UnusableSnapshot("the values are not an object")
        tensors = {n: _as_live(t, self._true[n]) for n, t in self._tensors.items()}
        return Saved(tensors, parsed)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major; without a copy if it is contiguous on the CPU.

    The view keeps the tensor's memory alive.
    """
    plain = tensor.detach().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if not size:
        return memoryview(b"")
    block: Any = (ctypes.c_ubyte * size).from_address(plain.data_ptr())
    block._owner = plain
    return memoryview(block).cast("B")


def differing(mine: Mapping[str, str], all_ranks: Iterable[Mapping[str, str]]) -> set[str]:
    """Groups whose digest is not the same on every rank."""
    found = set()
    for other in all_ranks:
        found |= {g for g in mine.keys() | other.keys() if mine.get(g) != other.get(g)}
    return found


def _whole(name: str, tensor: torch.Tensor) -> Region:
    dtype = _NAMES.get(tensor.dtype)
    if dtype is not None:
        shape = tuple(tensor.shape)
        return Region(name, dtype, (0,) * len(shape), shape, shape)
    shape = (*tensor.shape, tensor.element_size())
    true = str(tensor.dtype).removeprefix("torch.")
    return Region(name, "U8", (0,) * len(shape), shape, shape, true)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _NAMES:
        return tensor
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def _as_live(tensor: torch.Tensor, true_dtype: str) -> torch.Tensor:
    if not true_dtype:
        return tensor
    if true_dtype not in DTYPES or true_dtype.startswith("q"):  # quantized: never captured
        raise UnusableSnapshot(f"a stored tensor has the unknown type {true_dtype[:40]!r}")
    try:
        return tensor.view(DTYPES[true_dtype]).squeeze(-1)
    except RuntimeError as error:
        raise UnusableSnapshot(f"stored bytes are no {true_dtype}: {str(error)[:100]}") from error


def _rows(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor if region.is_whole else tensor.narrow(0, region.offset[0], region.shape[0])


def _flat(source: torch.Tensor) -> torch.Tensor:
    """Its bytes, row-major."""
    return source.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _page_aligned(num_bytes: int) -> torch.Tensor:
    """Fresh memory that begins at a page, so that a disk can be written from it directly."""
    page = shard_file.PAGE_BYTES
    memory = torch.empty(num_bytes + page, dtype=torch.uint8)
    first = -memory.data_ptr() % page
    return memory[first : first + num_bytes]


def _place(memory: torch.Tensor, region: Region) -> torch.Tensor:
    block = memory[region.first_byte : region.first_byte + region.num_bytes]
    return block.view(_DTYPES[region.dtype]).view(region.shape)
