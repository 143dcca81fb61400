"""Stage captured tensors as one shard file in memory. `destination` is the reverse.

Training waits only while regions are copied to their final positions. The memory is an arena, used
again by later saves: its contents are the file, byte for byte. Restored tensors are never bound to
it.

`stream` copies nothing ahead: for the last save, when training waits anyway.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from trainckpt.errors import SaveFailed
from trainckpt.format import digest, shard_file
from trainckpt.format.layout import whole
from trainckpt.format.shard_file import Region, ShardHeader
from trainckpt.state.captured import add_values
from trainckpt.state.device_copy import DeviceCopier, brought_back, new_buffer, on_host
from trainckpt.state.overlapped_copy import PendingCopy
from trainckpt.state.packed_copies import as_bytes
from trainckpt.storage.direct_io import at_address, private_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from trainckpt.state.capture_cache import TensorBlock
    from trainckpt.state.captured import Captured, Placed

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TYPES = {name: dtype for dtype, name in _NAMES.items()}  # safetensors type -> torch's
STREAM_BYTES = 16 << 20
SMALL_BYTES = 64 << 10  # up to this size memmove beats the setup of a torch copy
CACHED_BYTES = 256 << 10  # a power of two, like blocks; fits twice into a core's own cache
_NO_DEVICE = DeviceCopier()


@dataclass
class Shard:
    """One rank's shard file in memory.

    Attributes:
        header: Without digests until `head` is read.
        memory: The file's exact bytes, once `head` is read.
        rest: Copies still to make, before `head` is read.
        descriptor: File descriptor of the memory, if it is a file.
        digests: Digests of regions made while copying, by key.
    """

    header: ShardHeader
    memory: memoryview
    rest: list[PendingCopy] = field(default_factory=list)
    descriptor: int | None = None
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def top(self) -> memoryview:
        """Return the memory of `head`."""
        return self.memory[: self.header.header_bytes]

    @cached_property
    def data(self) -> memoryview:
        """Return the memory of the regions."""
        return self.memory[self.header.header_bytes :]

    @cached_property
    def head(self) -> bytes:
        """Build the file's first bytes, with missing digests: not on the training thread."""
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
        """Yield the file's bytes, in order."""
        yield memoryview(self.head)
        if len(self.data):
            yield self.data

    @property
    def num_bytes(self) -> int:
        """Return the length of the file."""
        return len(self.memory)


class TensorsChanged(SaveFailed):
    """Live tensors changed while they were streamed, by a worker or a thread."""


@dataclass
class StreamedShard:
    """One rank's shard file, read from the live tensors during the write.

    The tensors must not change from `stream` until `is_read`. If one does, `blocks` raises
    `TensorsChanged` instead of ending.

    Attributes:
        is_read: Set once nothing reads them any more, whether or not the file was written.
    """

    header: ShardHeader
    head: bytes
    sources: list[torch.Tensor]  # rows of live tensors, in the order of the file's regions
    is_read: threading.Event = field(default_factory=threading.Event)

    def blocks(self) -> Iterator[memoryview]:
        """Yield the file's bytes, in order. Each block is valid until the next is taken.

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
        size = min(STREAM_BYTES, self.header.data_bytes) or 1
        locked = any(source.is_cuda for source in self.sources)
        buffers = itertools.cycle([_page_aligned(size, pinned=locked) for _ in range(2)])
        buffer, filled = next(buffers), 0
        for region, source in zip(self.header.regions, self.sources, strict=True):
            flat, done = as_bytes(source if source.is_contiguous() else on_host(source)), 0
            seen = digest.RunningByBlock(shard_file.block_bytes(region.num_bytes))
            while done < flat.numel():
                step = min(flat.numel() - done, buffer.numel() - filled)
                buffer[filled : filled + step].copy_(flat[done : done + step])
                seen.update(bytes_of(buffer[filled : filled + step]))
                done, filled = done + step, filled + step
                if filled == buffer.numel():
                    yield bytes_of(buffer)
                    buffer, filled = next(buffers), 0
            if seen.hexdigest() != self.header.digests[region.key]:
                raise TensorsChanged(f"{region.tensor} changed while it was written")
        if filled:
            yield bytes_of(buffer)[:filled]


def describe(captured: Captured, layouts: Collection[str]) -> list[Region]:
    """Return this rank's region of every captured tensor, values included; offsets not yet set.

    A tensor without a layout is this rank's own: its region is the whole tensor.
    """
    add_values(captured)
    return regions_of(captured, layouts)


def regions_of(captured: Captured, layouts: Collection[str]) -> list[Region]:
    """Return the regions as `describe` does, with the values added already."""
    return [
        _region(name, tensor, captured.placed.get(name) if name in layouts else None)
        for name, tensor in captured.tensors.items()
    ]


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of one tensor's type, shape and bytes."""
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
    device_copier: DeviceCopier | None = None,
    digests: bool = False,
    cache: StagingCache | None = None,
) -> Shard:
    """Copy `regions` of the captured tensors to their positions in one shard file.

    Args:
        captured, regions: The live tensors, and the regions of them stored by this rank.
        rank, world: This rank, and the number of ranks.
        memory: Returns page-aligned memory of so many bytes; its earlier result is then invalid.
            None: fresh memory of this process.
        references: Regions not copied, since an older file has their bytes.
        later: Tensors not copied yet, but listed in the shard's `rest`.
        device_copier: Copies from a GPU. None: no GPU copies.
        digests: Also digest the regions copied by this thread, while they are in a cache. It
            slows this thread: for hosts with no free core.
        cache: Of earlier saves of this rank.
    """
    cache = cache or StagingCache()
    header = cache.header(ShardHeader(rank, world, tuple(regions), references=references or {}))
    device_copier = device_copier or _NO_DEVICE
    device_copier.settle()
    size = header.header_bytes + header.data_bytes
    shard = Shard(header, (memory or private_memory)(size))
    begin = torch.frombuffer(shard.data, dtype=torch.uint8).data_ptr() if len(shard.data) else 0
    by_device = []
    digests = digests and torch.get_num_threads() == 1  # else torch's threads share the copy
    runs, others = cache.plan_copies(captured, header)
    for first_byte, address, num_bytes in runs:
        ctypes.memmove(begin + first_byte, address, num_bytes)
    for region in others:
        if not region.num_bytes:
            continue
        source, target = source_of(captured, region), begin + region.first_byte
        is_taken = device_copier.takes(source, target)
        is_run = source.is_cpu and source.is_contiguous()
        if region.tensor in later and (
            not device_copier.is_replayed if is_taken else source.is_cpu
        ):
            shard.rest.append(PendingCopy(region.tensor, source, target))
        elif is_taken:
            by_device.append((target, source))
        elif is_run and source.nbytes <= SMALL_BYTES:
            ctypes.memmove(target, source.data_ptr(), source.nbytes)
        elif is_run and digests:
            shard.digests[region.key] = _copied(target, source)
        else:
            _place(shard.data, region).copy_(source)
    device_copier.copy(by_device)
    return shard


class StagingCache:
    """Keeps what repeats from save to save: the header, and the plan of the small copies.

    Small copies are those from tensors that an earlier save had at the same addresses. They are
    planned once, as long as header and captured blocks are the same objects.
    """

    def __init__(self) -> None:
        self._asked: ShardHeader | None = None
        self._header: ShardHeader | None = None
        self._key: tuple[ShardHeader, list[TensorBlock]] | None = None
        self._copies: tuple[list[tuple[int, int, int]], list[Region]] = [], []

    def header(self, asked: ShardHeader) -> ShardHeader:
        """Return the header with all offsets; the last one if the same regions are asked for."""
        if self._header is None or asked != self._asked:
            self._asked, self._header = asked, _laid_out(asked)
        return self._header

    def plan_copies(
        self, captured: Captured, header: ShardHeader
    ) -> tuple[list[tuple[int, int, int]], list[Region]]:
        """Return (first byte in the file's data, address, bytes) of each, and the other regions."""
        key = self._key
        if key is None or key[0] is not header or key[1] != captured.blocks:
            small = frozenset().union(*(block.small for block in captured.blocks))
            runs, others = list[tuple[int, int, int]](), list[Region]()
            for region in header.regions:
                source = captured.tensors[region.tensor] if region.tensor in small else None
                is_all = source is not None and region.num_bytes == source.nbytes
                if source is not None and is_all and source.is_cpu and source.is_contiguous():
                    runs.append((region.first_byte, source.data_ptr(), source.nbytes))
                else:
                    others.append(region)
            self._key, self._copies = (header, captured.blocks), (runs, others)
        return self._copies


def _copied(target: int, source: torch.Tensor) -> str:
    """Copy to that address, and return the digests by block of the copy."""
    num_bytes = source.nbytes
    block = shard_file.block_bytes(num_bytes)
    step = max(block, CACHED_BYTES)
    memory = at_address(target, num_bytes)
    live = at_address(source.data_ptr(), num_bytes, source)
    digests = []
    for first in range(0, num_bytes, step):
        part = memory[first : first + step]
        part[:] = live[first : first + step]
        digests.append(digest.digests_by_block(part, block))  # while the copy is in the cache
    return "".join(digests)


def _laid_out(header: ShardHeader) -> ShardHeader:
    """Return the header with all offsets."""
    return shard_file.reserve(replace(header, regions=shard_file.lay_out(header.regions)))


@torch.no_grad()
def stream(
    captured: Captured,
    regions: Iterable[Region],
    *,
    rank: int,
    world: int,
    references: Mapping[str, str] | None = None,
) -> StreamedShard:
    """Lay out the file as `stage` does, but copy nothing before it is written."""
    header = _laid_out(ShardHeader(rank, world, tuple(regions), references=references or {}))
    sources = [source_of(captured, region) for region in header.regions]
    header = shard_file.with_digests(header, digests_of(captured, header.regions))
    return StreamedShard(header, shard_file.build(header), sources)


@torch.no_grad()
def digests_of(captured: Captured, regions: Iterable[Region]) -> dict[str, str]:
    """Return key -> digests by block of the live tensors' bytes, in the header's format."""
    digests = {}
    for region in regions:
        source, block = source_of(captured, region), shard_file.block_bytes(region.num_bytes)
        if source.is_cpu or not source.is_contiguous():
            digests[region.key] = digest.digests_by_block(bytes_of(source), block)
            continue
        seen = digest.RunningByBlock(block)
        for _, part in brought_back(source):
            seen.update(bytes_of(part))
        digests[region.key] = seen.hexdigest()
    return digests


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes, row-major; without a copy if it is contiguous on the CPU.

    The view keeps the tensor's memory alive.
    """
    plain = tensor if tensor.is_cpu and tensor.is_contiguous() else on_host(tensor)
    return at_address(plain.data_ptr(), plain.nbytes, plain) if plain.nbytes else memoryview(b"")


def _region(name: str, tensor: torch.Tensor, placed: Placed | None) -> Region:
    dtype, of = _NAMES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is not None and placed is None:
        return Region.whole(name, dtype, of, "")
    box = whole(of)
    if placed is not None:
        box, of = placed.box, placed.shape
    if dtype is not None:
        return Region(name, dtype, box.offset, box.shape, of)
    size = tensor.element_size()
    true = str(tensor.dtype).removeprefix("torch.")
    return Region(
        tensor=name,
        dtype="U8",
        offset=(*box.offset, 0),
        shape=(*box.shape, size),
        of=(*of, size),
        true_dtype=true,
    )


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _NAMES:
        return tensor
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def source_of(captured: Captured, region: Region) -> torch.Tensor:
    """Return the rows of a live tensor stored by a region."""
    tensor = _as_stored(captured.tensors[region.tensor])
    if region.num_bytes and region.shape == region.of:
        return tensor
    if 0 in region.shape:
        return tensor.new_empty(region.shape)
    if not region.shape or tensor.shape[0] == region.shape[0]:
        return tensor
    first = 0
    if region.tensor in captured.placed:
        first = captured.placed[region.tensor].box.offset[0]
    return tensor.narrow(0, region.offset[0] - first, region.shape[0])


def _page_aligned(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Return fresh page-aligned memory for direct disk writes; `pinned`: for a GPU too."""
    if not pinned:
        return torch.frombuffer(private_memory(num_bytes), dtype=torch.uint8)
    memory = new_buffer(num_bytes + shard_file.PAGE_BYTES, pinned=True)
    return memory[-memory.data_ptr() % shard_file.PAGE_BYTES :][:num_bytes]


def _place(data: memoryview, region: Region) -> torch.Tensor:
    block = data[region.first_byte : region.first_byte + region.num_bytes]
    return torch.frombuffer(block, dtype=TYPES[region.dtype]).view(region.shape)
