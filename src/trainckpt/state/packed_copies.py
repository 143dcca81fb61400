"""Copy small tensors together if they are adjacent in a shard file.

One copy call for a GPU takes some 30 us of Python, and a model has thousands of small tensors. So
tensors adjacent in the file are concatenated in a buffer on the GPU, and one copy brings the buffer
to the file. The layout of shard files puts small tensors together for this.

A run lies within one range of page-locked memory: a copy across two is an error.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainckpt.format.shard_file import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

RUN_BYTES = 16 << 20  # size of the buffer; a link of 25 GB/s takes 0.7 ms for it
# Packed as they are, not as bytes: half the Python, and fewer elements for the GPU.
_PACKED_AS_THEY_ARE = frozenset(
    (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
)


class Run(NamedTuple):
    """Copies with adjacent targets.

    Attributes:
        target: Address of the first byte.
        sources: Contiguous, one after the other; a large one is alone.
        num_bytes: Sum of their sizes.
    """

    target: int
    sources: tuple[torch.Tensor, ...]
    num_bytes: int


def as_runs(copies: Iterable[tuple[int, torch.Tensor]], ends: Iterable[int] = ()) -> list[Run]:
    """Return the runs of these copies to addresses, with contiguous sources.

    Args:
        copies: Address and source of each, by address.
        ends: Addresses no run may cross: the ends of ranges of locked memory.
    """
    runs: list[Run] = []
    small: list[torch.Tensor] = []  # the open run
    begin = end = 0
    low, high = 0.0, 0.0  # the range of the last copy
    cuts = sorted(ends)
    for target, source in copies:
        size = source.nbytes
        is_elsewhere = not low <= target < high
        is_full = end + size - begin > RUN_BYTES
        if small and (target != end or is_elsewhere or is_full):
            runs.append(Run(begin, tuple(small), end - begin))
            small = []
        if is_elsewhere:
            low, high = _range(cuts, target)
        if target + size > high:
            runs += _cut(target, source, cuts)
        elif size >= SMALL_BYTES:
            runs.append(Run(target, (source,), size))
        else:
            begin = begin if small else target
            small.append(source)
            end = target + size
    if small:
        runs.append(Run(begin, tuple(small), end - begin))
    return runs


@torch.no_grad()
def pack(run: Run, buffer: torch.Tensor) -> torch.Tensor:
    """Return a run's bytes, in the buffer if there are several tensors.

    A reader must be submitted on this stream before the buffer is used again.
    """
    if len(run.sources) == 1:
        return as_bytes(run.sources[0])
    into, dtype = buffer[: run.num_bytes], run.sources[0].dtype
    if dtype in _PACKED_AS_THEY_ARE and all(each.dtype is dtype for each in run.sources):
        flat = [each if each.dim() == 1 else each.view(-1) for each in run.sources]
        torch.cat(flat, out=into.view(dtype))
    else:
        torch.cat([as_bytes(each) for each in run.sources], out=into)
    return into


def as_bytes(source: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, without a copy."""
    return source.detach().view(-1).view(torch.uint8)


def _range(cuts: Sequence[int], address: int) -> tuple[float, float]:
    """Return the last cut at or below an address, and the next."""
    next_one = bisect.bisect_right(cuts, address)
    return cuts[next_one - 1] if next_one else 0, [*cuts, math.inf][next_one]


def _cut(target: int, source: torch.Tensor, cuts: Sequence[int]) -> Iterator[Run]:
    """Yield a copy in parts, each in one range."""
    flat, behind = as_bytes(source), target + source.nbytes
    ends = [cut for cut in cuts if target < cut < behind]
    for begin, end in zip([target, *ends], [*ends, behind], strict=True):
        yield Run(begin, (flat[begin - target : end - target],), end - begin)
