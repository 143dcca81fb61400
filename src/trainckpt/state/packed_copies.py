"""Packed copies: small tensors that lie side by side in a shard file are copied there together.

To ask a GPU for one copy takes some 30 us of Python, and a model has thousands of small tensors. So
those that follow each other in the file are put end to end into a buffer on the GPU, and one copy
brings that to the file. The layout of shard files puts small tensors together for this.

A run lies within one range of memory that is locked for the GPU: a copy across two is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from trainckpt.format.shard_file import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RUN_BYTES = 16 << 20  # of the buffer; a link of 25 GB/s takes 0.7 ms for it


class Run(NamedTuple):
    """Copies whose places follow each other.

    Attributes:
        target: Address of the first byte.
        sources: Flat bytes, one after the other; those of a large tensor are alone.
    """

    target: int
    sources: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(source.numel() for source in self.sources)


def as_runs(copies: Iterable[tuple[int, torch.Tensor]], ends: Iterable[int] = ()) -> list[Run]:
    """Return the runs of these copies to addresses, whose sources are contiguous.

    Args:
        copies: Address and source of each, by address.
        ends: Addresses at which a run has to end: those of ranges of locked memory.
    """
    runs: list[Run] = []
    open_run: list[torch.Tensor] = []
    begin = end = 0
    ends = frozenset(ends)
    for target, flat in _cut(copies, ends):
        size = flat.numel()
        is_small = size < SMALL_BYTES
        follows = target == end and target not in ends and end + size - begin <= RUN_BYTES
        if open_run and not (is_small and follows):
            runs.append(Run(begin, tuple(open_run)))
            open_run = []
        if not is_small:
            runs.append(Run(target, (flat,)))
            continue
        begin = begin if open_run else target
        open_run.append(flat)
        end = target + size
    if open_run:
        runs.append(Run(begin, tuple(open_run)))
    return runs


def pack(run: Run, buffer: torch.Tensor) -> torch.Tensor:
    """Return a run's bytes, in the buffer if they are of several tensors.

    Whatever reads them must have begun on this stream before the buffer is used again.
    """
    if len(run.sources) == 1:
        return run.sources[0]
    into = buffer[: run.num_bytes]
    return torch.cat(run.sources, out=into)


def _cut(
    copies: Iterable[tuple[int, torch.Tensor]], ends: frozenset[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """The copies, as bytes; each that would go beyond an end in two."""
    for target, source in copies:
        flat = source.detach().reshape(-1).view(torch.uint8)
        done, behind = 0, target + flat.numel()
        for cut in sorted(end for end in ends if target < end < behind):
            yield target + done, flat[done : cut - target]
            done = cut - target
        yield target + done, flat[done:] if done else flat
