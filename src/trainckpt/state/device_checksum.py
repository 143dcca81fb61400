"""Checksums of tensors' bytes, computed where the tensors are.

A GPU reads its memory at a hundred times the rate of its link to the host. So bytes that are only
compared (replicas of several ranks; frozen weights with an earlier save) never leave it: each
tensor becomes two 64-bit sums, and the sums of all tensors are brought to the host by one copy.

Each 8 bytes are mixed with their position by a bijection, and the results are added up. So a change
within 8 bytes always changes the first sum; other changes leave both sums as they were with a
probability of about 2**-128.
The arithmetic is of integers modulo 2**64: the order of the additions does not matter, and every
device gives the same sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Return 16 bytes for each tensor, which depend on its bytes in row-major order alone."""
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
    """Return a copy of bytes as 64-bit integers; zeros stand for what the last one lacks."""
    missing = -chunk.numel() % LANE_BYTES
    copied = torch.nn.functional.pad(chunk, (0, missing)) if missing else chunk.clone()
    return copied.view(torch.int64)


def _fold(lanes: torch.Tensor, by: int, scratch: torch.Tensor) -> None:
    """Combine each integer with its own upper bits, `by` lower: a bijection, in place."""
    torch.bitwise_right_shift(lanes, by, out=scratch)
    scratch &= (1 << (64 - by)) - 1  # zeros from the left, whatever the sign
    lanes ^= scratch
