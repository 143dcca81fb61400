"""Stage: captured tensors -> one shard file in memory. `destination` is the way back.

Copying the regions to their final places is the only moment training waits for. The memory is an
arena, kept and used again: what stands in it is the file, byte for byte. Restored tensors are never
bound to it.

`stream` copies nothing ahead: for a save that training waits for anyway, because it ends.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

from trainckpt.errors import SaveFailed
from trainckpt.format import digest, shard_file
from trainckpt.format.layout import whole
from trainckpt.format.shard_file import Region, ShardHeader
from trainckpt.state.copies import Copies
from trainckpt.state.given import may_be_written_by_others
from trainckpt.state.overlap import Piece
from trainckpt.state.pinned import brought_back, new_buffer, on_host
from trainckpt.state.side import Side
from trainckpt.state.stored_values import add_values
from trainckpt.tiers import past_cache
from trainckpt.tiers.direct import at_address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from trainckpt.state.captured import Captured, Placed

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in _NAMES.items()}  # safetensors type -> torch's
STREAM_BYTES = 16 << 20
SMALL_BYTES = 64 << 10  # what is smaller is copied sooner than torch has prepared to copy it
CACHED_BYTES = 256 << 10  # a power of two, as blocks are: a core's own cache holds it, and its copy
_NO_SIDE = Side()


@dataclass
class Shard:
    """One rank's shard file in memory.

    Attributes:
        header: Its digests are not known before `head` was asked for.
        memory: The file's exact bytes, once `head` was asked for.
        rest: What was not copied yet; must be before `head` is asked for.
        descriptor: Of the file that the memory is, where it is one.
        digests: Of regions that were digested as they were copied, by key.
    """

    header: ShardHeader
    memory: memoryview
    rest: list[Piece] = field(default_factory=list)
    descriptor: int | None = None
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def top(self) -> memoryview:
        """Where `head` stands."""
        return self.memory[: self.header.header_bytes]

    @cached_property
    def data(self) -> memoryview:
        """The regions."""
        return self.memory[self.header.header_bytes :]

    @cached_property
    def head(self) -> bytes:
        """The file's first bytes. Digests what was not yet: not for the thread that trains."""
        digests = {
            r.key: self.digests.get(r.key)
            or digest.digests_by_block(
                self.data[r.first_byte : r.first_byte + r.num_bytes],
                shard_file.block_bytes(r.num_bytes),
            )
            for r in self.header.regions
        }
        self.header = shard_file.with_digests(self.header, digests)
        head = shard_file.build(self.header)
        self.memory[: self.header.header_bytes] = head
        return head

    def blocks(self) -> Iterator[memoryview]:
        """The file's bytes, in order."""
        yield memoryview(self.head)
        if len(self.data):
            yield self.data

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return len(self.memory)


class TensorsChanged(SaveFailed):
    """Something wrote to live tensors while they were streamed: a worker, a thread."""


@dataclass
class Stream:
    """One rank's shard file, whose data is read from the live tensors when it is written.

    They must not change from `stream` until `is_read`; if one does, `blocks` raises
    `TensorsChanged` instead of ending.

    Attributes:
        is_read: Set once nobody reads them any more, whether or not the file was written.
    """

    header: ShardHeader
    head: bytes
    sources: list[torch.Tensor]  # regions in the order of the file, rows of live tensors
    is_read: threading.Event = field(default_factory=threading.Event)

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
        locked = any(source.is_cuda for source in self.sources)
        buffers = itertools.cycle([_page_aligned(size, pinned=locked) for _ in range(2)])
        buffer, filled = next(buffers), 0
        for region, source in zip(self.header.regions, self.sources, strict=True):
            flat, done = _flat(source), 0
            seen = digest.RunningByBlock(shard_file.block_bytes(region.num_bytes))
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


def describe(captured: Captured, layouts: Collection[str]) -> list[Region]:
    """What this rank holds of every captured tensor, values included; places not yet given.

    Of what has no layout it holds a tensor of its own, whole: no other rank's part belongs to it.
    """
    add_values(captured)
    return held(captured, layouts)


def held(captured: Captured, layouts: Collection[str]) -> list[Region]:
    """As `describe`, once the values are there."""
    return [
        _held(name, tensor, captured.placed.get(name) if name in layouts else None)
        for name, tensor in captured.tensors.items()
    ]


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
    memory: Callable[[int], memoryview] | None = None,
    references: Mapping[str, str] | None = None,
    later: Collection[str] = (),
    side: Side | None = None,
    digests: bool = False,
) -> Shard:
    """Copy `regions` of the captured tensors to their places in one shard file.

    Args:
        captured: The live tensors.
        regions: What this rank stores, as the save plan decided.
        rank: Of this process.
        world: Ranks of the attempt.
        memory: Asked for so many bytes that begin at a page; what it gave before is then gone.
            None: fresh memory of this process.
        references: Regions that are not copied, since an older file holds their bytes.
        later: Tensors that are not copied either, but named as the shard's `rest`.
        side: What copies from a GPU by itself. None: nothing does.
        digests: Digest what is copied by this thread, too, while a cache holds it: for where no
            core is free to do that, since this thread takes longer.
    """
    header = _laid_out(tuple(regions), rank, world, tuple((references or {}).items()))
    side = side or _NO_SIDE
    side.settle()
    size = header.header_bytes + header.data_bytes
    shard = Shard(header, (memory or private_memory)(size))
    begin = torch.frombuffer(shard.data, dtype=torch.uint8).data_ptr() if len(shard.data) else 0
    by_device, copies, is_ready = [], Copies(), side.is_ready
    digests = digests and torch.get_num_threads() == 1  # else torch's threads share the copy
    for region in header.regions:
        if not region.num_bytes:
            continue
        source, target = source_of(captured, region), begin + region.first_byte
        is_taken = is_ready and side.takes(source, target)
        is_run = source.is_cpu and source.is_contiguous()
        if region.tensor in later and (not side.is_replayed if is_taken else source.is_cpu):
            shard.rest.append(Piece(region.tensor, source, target))
        elif is_taken:
            by_device.append((target, source))
        elif is_run and source.nbytes <= SMALL_BYTES:
            ctypes.memmove(target, source.data_ptr(), source.nbytes)
        elif is_run and digests:
            shard.digests[region.key] = _copied(target, source)
        elif is_run and past_cache.pays(target, source.nbytes):
            copies.add_past_cache(target, source)
        else:
            _place(shard.data, region).copy_(source)
    copies.run(torch.get_num_threads())
    side.copy(by_device)
    return shard


def _copied(target: int, source: torch.Tensor) -> str:
    """Copy it to that address; the digests by block of what stands there then.

    What goes past the cache is in it only where it was copied from; if others may write there, it
    is not.
    """
    num_bytes, found = source.nbytes, list[str]()
    block = shard_file.block_bytes(num_bytes)
    is_past = past_cache.pays(target, num_bytes) and not may_be_written_by_others(source)
    step = max(block, past_cache.FROM_BYTES if is_past else CACHED_BYTES)
    memory = at_address(target, num_bytes)
    live = at_address(source.data_ptr(), num_bytes, source)
    for at in range(0, num_bytes, step):
        part, of = memory[at : at + step], live[at : at + step]
        if is_past:  # either keeps the interpreter: to get it back may take 5 ms
            past_cache.copy_holding(target + at, source.data_ptr() + at, len(of))
        else:
            part[:] = of
        found.append(digest.digests_by_block(of if is_past else part, block))
    return "".join(found)


@lru_cache(maxsize=4)
def _laid_out(
    regions: tuple[Region, ...], rank: int, world: int, references: tuple[tuple[str, str], ...] = ()
) -> ShardHeader:
    """Where everything goes. From save to save most often the same, so it is remembered."""
    header = ShardHeader(rank, world, shard_file.lay_out(regions), references=dict(references))
    return replace(header, header_bytes=len(shard_file.build(header)))


@torch.no_grad()
def stream(
    captured: Captured,
    regions: Iterable[Region],
    *,
    rank: int,
    world: int,
    references: Mapping[str, str] | None = None,
) -> Stream:
    """As `stage`, but nothing is copied before the file is written."""
    header = _laid_out(tuple(regions), rank, world, tuple((references or {}).items()))
    sources = [source_of(captured, region) for region in header.regions]
    header = shard_file.with_digests(header, digests_of(captured, header.regions))
    return Stream(header, shard_file.build(header), sources)


@torch.no_grad()
def digests_of(captured: Captured, regions: Iterable[Region]) -> dict[str, str]:
    """Key -> digests by block of the live tensors' bytes, as a header tells them."""
    return {
        region.key: _digests_of(
            source_of(captured, region), shard_file.block_bytes(region.num_bytes)
        )
        for region in regions
    }


def _digests_of(source: torch.Tensor, block_bytes: int) -> str:
    if source.is_cpu or not source.is_contiguous():
        return digest.digests_by_block(bytes_of(source), block_bytes)
    seen = digest.RunningByBlock(block_bytes)
    for _, part in brought_back(source, 0, source.nbytes):
        seen.update(bytes_of(part))
    return seen.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major; without a copy if it is contiguous on the CPU.

    The view keeps the tensor's memory alive.
    """
    plain = tensor
    if not (tensor.is_cpu and tensor.is_contiguous()):
        plain = on_host(tensor)
    size = plain.nbytes
    return at_address(plain.data_ptr(), size, plain) if size else memoryview(b"")


def _held(name: str, tensor: torch.Tensor, placed: Placed | None) -> Region:
    box, of = whole(tuple(tensor.shape)), tuple(tensor.shape)
    if placed is not None:
        box, of = placed.box, placed.shape
    dtype = _NAMES.get(tensor.dtype)
    if dtype is not None:
        return Region(name, dtype, box.offset, box.shape, of)
    size = tensor.element_size()
    true = str(tensor.dtype).removeprefix("torch.")
    return Region(name, "U8", (*box.offset, 0), (*box.shape, size), (*of, size), true)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _NAMES:
        return tensor
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def source_of(captured: Captured, region: Region) -> torch.Tensor:
    """The rows of a live tensor that a region stores."""
    tensor = _as_stored(captured.tensors[region.tensor])
    if 0 in region.shape:
        return tensor.new_empty(region.shape)
    if not region.shape or tensor.shape[0] == region.shape[0]:
        return tensor
    first = 0
    if region.tensor in captured.placed:
        first = captured.placed[region.tensor].box.offset[0]
    return tensor.narrow(0, region.offset[0] - first, region.shape[0])


def _flat(source: torch.Tensor) -> torch.Tensor:
    """Its bytes, row-major; where it is, if they lie so there."""
    plain = source.detach() if source.is_contiguous() else source.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def private_memory(num_bytes: int) -> memoryview:
    """Fresh memory of this process that begins at a page."""
    return bytes_of(_page_aligned(num_bytes))


def _page_aligned(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Fresh memory that begins at a page, so that a disk can be written from it directly; `pinned`,
    so that a GPU reaches it itself.

    Not malloc's: of that, each thread that ever asked for some would keep some to itself.
    """
    if pinned or not hasattr(mmap, "MAP_PRIVATE"):
        page = shard_file.PAGE_BYTES
        memory = new_buffer(num_bytes + page, pinned=pinned)
        first = -memory.data_ptr() % page
        return memory[first : first + num_bytes]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fresh = mmap.mmap(-1, num_bytes or 1, flags=flags)
    return torch.frombuffer(fresh, dtype=torch.uint8)[:num_bytes]


def _place(data: memoryview, region: Region) -> torch.Tensor:
    block = data[region.first_byte : region.first_byte + region.num_bytes]
    return torch.frombuffer(block, dtype=TYPES[region.dtype]).view(region.shape)
