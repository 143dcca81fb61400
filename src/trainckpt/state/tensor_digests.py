"""Find the tensors equal on all their replicas.

Under DDP and HSDP several ranks have equal bytes, and each byte is saved once, split over them.
Equality is checked, never assumed: a buffer may be a rank's own, and so is a gradient inside a
window. Unequal tensors are saved by each rank.

Tensors on a device are compared by checksums computed there: a GPU reads its memory at a hundred
times the rate of its link to the host. Replicas of several ranks, and frozen weights since an
earlier save, need only a comparison, so their bytes never leave the device. Each tensor becomes two
64-bit sums, and one copy brings the sums of all tensors to the host.

Each 8 bytes are mixed with their position by a bijection, and the results are added up. So a change
within 8 bytes always changes the first sum. Any other change leaves both sums equal with a
probability of about 2**-128. The arithmetic is of integers modulo 2**64: the order of additions
does not matter, and every device gives the same sums.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from trainckpt.state.staging import bytes_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trainckpt.format.layout import Layout
    from trainckpt.state.captured import Captured


PAGE_BYTES = 4096
PARTS = 64  # a sample has one of so many parts, in turn
MOST_NAMES = 1 << 16  # cached from save to save


def group_digests(
    captured: Captured,
    rank: int,
    world: int,
    *,
    sampled: Collection[str] = (),
    number: int = 0,
) -> dict[str, tuple[str, int, str]]:
    """Return group -> (set of replicas, ranks in it, digest of the group's tensors by name).

    Only tensors with replicas on other ranks count. The digest is over name, type, shape and bytes,
    or over the checksum of tensors on a device. `snapshot.save_plan.equal_groups` compares them.

    Args:
        captured, rank, world: State of this rank, its number, and the number of ranks.
        sampled: Tensors compared by a sample only: the first page, and a part advancing with
            `number`. Digesting them all costs training as much as copying them.
        number: Number of the save.
    """
    states: dict[str, tuple[str, int, Any]] = {}
    met: dict[tuple[str, int], Any] = {}  # layouts are few, and long to spell
    layouts = {n: a for n, a in captured.layouts(world).items() if a.num_replicas > 1}
    on_device = [name for name in layouts if not captured.tensors[name].is_cpu]
    compared = (
        _sample_there(captured.tensors[name], number) if name in sampled else captured.tensors[name]
        for name in on_device
    )
    sums = dict(zip(on_device, checksums(list(compared)), strict=True))
    for name in sorted(layouts):
        layout = layouts[name]
        tensor, key = captured.tensors[name], (captured.groups[name], id(layout))
        if key not in met:
            group = group_of(captured, name, layout)
            found = (*layout.replica_set(rank), xxhash.xxh3_128())
            met[key] = states.setdefault(group, found)[2].update
        update = met[key]
        update(_facts(name, tensor.dtype, tensor.shape))
        if name in sums:
            update(sums[name])
        elif name not in sampled:
            update(bytes_of(tensor))
        else:
            for part in _sample(tensor, number):
                update(part)
    return {group: (name, n, state.hexdigest()) for group, (name, n, state) in states.items()}


@lru_cache(MOST_NAMES)
def _facts(name: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{name} {dtype} {tuple(shape)};".encode()


def _sample(tensor: torch.Tensor, number: int) -> list[memoryview]:
    data, (first, end) = bytes_of(tensor), _part(tensor, number)
    return [data[:PAGE_BYTES], data[first:end]]


def _sample_there(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return the sample as a tensor on the device: the rest never leaves it."""
    flat, (first, end) = tensor.detach().contiguous().reshape(-1), _part(tensor, number)
    flat = flat.view(torch.uint8)
    return torch.cat([flat[:PAGE_BYTES], flat[first:end]])


def _part(tensor: torch.Tensor, number: int) -> tuple[int, int]:
    """Return the first and end byte of the part in turn."""
    first = number % PARTS * tensor.nbytes // PARTS
    return first, first + -(-tensor.nbytes // PARTS)


SAMPLED_TENSORS, SAMPLED_BYTES = 16, 256


def is_flat(tensor: torch.Tensor) -> bool:
    """Return True if `sample` can take some bytes of a tensor without copying the rest."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and tensor.nbytes > 0


def sample(tensors: Sequence[torch.Tensor], number: int, known: str = "") -> str:
    """Return a digest of a few bytes of a few tensors, in turn by `number`, and of `known`.

    It costs next to nothing, and shows replicas that drift apart as a whole. The bytes are of the
    first page, which every comparison of `group_digests` includes.
    """
    state, count = xxhash.xxh3_128(known.encode()), min(SAMPLED_TENSORS, len(tensors))
    chosen = [tensors[(number * count + n) % len(tensors)] for n in range(count)]
    parts = []
    for tensor in chosen:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        first = number * SAMPLED_BYTES % max(min(len(flat), PAGE_BYTES) - SAMPLED_BYTES, 1)
        parts.append(flat[first : first + SAMPLED_BYTES])
    if len({part.device for part in parts}) == 1:  # a GPU answers once
        parts = [torch.cat(parts)]
    for part in parts:
        state.update(bytes_of(part.cpu()))
    return state.hexdigest()


def group_of(captured: Captured, name: str, layout: Layout) -> str:
    """Return the group of a tensor: tensors of one group and layout are compared together."""
    return f"{captured.groups[name]} over {layout.mesh} {layout.base} {layout.dims}"


def kind_of(group: str) -> str:
    """Return the group's name without its layout."""
    return group.rpartition(" over ")[0]


def split_layouts(captured: Captured, equal: Collection[str], world: int) -> dict[str, Layout]:
    """Return tensor -> layout, for tensors with equal replicas or none."""
    return {
        name: layout
        for name, layout in captured.layouts(world).items()
        if layout.num_replicas == 1 or group_of(captured, name, layout) in equal
    }


LANE_BYTES = 8
CHUNK_BYTES = 16 << 20  # mixed at a time, in three buffers of this size
# Odd numbers of 64 bits with about as many ones as zeros, as signed integers.
_POSITION, _FIRST, _SECOND = (
    number - (1 << 64)
    for number in (
        0x9E6D_62D0_6F6A_9A9B,
        0xC3A5_C85C_97CB_3127,
        0xB492_B66F_BE98_F273,
    )
)


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return 16 bytes for each tensor, determined by its bytes in row-major order alone."""
    sums = [_sums(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    found = [b""] * len(tensors)
    for numbers in by_device.values():
        on_host = torch.stack([sums[number] for number in numbers]).cpu()
        for number, row in zip(numbers, on_host.tolist(), strict=True):
            found[number] = b"".join(each.to_bytes(8, "little", signed=True) for each in row)
    return found


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = torch.full((2,), flat.numel(), dtype=torch.int64, device=tensor.device)
    for first in range(0, flat.numel(), CHUNK_BYTES):
        mixed = _lanes(flat[first : first + CHUNK_BYTES])
        begin = first // LANE_BYTES
        position = torch.arange(begin, begin + mixed.numel(), device=tensor.device)
        mixed ^= position.mul_(_POSITION)
        scratch = position  # the same memory
        _fold(mixed, 32, scratch)
        mixed *= _FIRST
        _fold(mixed, 29, scratch)
        sums[0] += mixed.sum()
        mixed *= _SECOND
        _fold(mixed, 32, scratch)
        sums[1] += mixed.sum()
    return sums


def _lanes(chunk: torch.Tensor) -> torch.Tensor:
    """Return a copy of bytes as 64-bit integers; the last one is padded with zeros."""
    missing = -chunk.numel() % LANE_BYTES
    copied = torch.nn.functional.pad(chunk, (0, missing)) if missing else chunk.clone()
    return copied.view(torch.int64)


def _fold(lanes: torch.Tensor, by: int, scratch: torch.Tensor) -> None:
    """Combine each integer with its own bits shifted down by `by`: a bijection, in place."""
    torch.bitwise_right_shift(lanes, by, out=scratch)
    scratch &= (1 << (64 - by)) - 1  # zeros from the left, whatever the sign
    lanes ^= scratch
