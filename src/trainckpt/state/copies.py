"""Copies between tensors, made by all cores that a rank may use; the caller waits for them.

Huge pages for what is copied to were tried, and left out: on virtual machines that give free memory
back to their host, they are those that have to be fetched again first, so it took twice as long.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

PIECE_BYTES = 8 << 20  # of one copy, so that threads can share a tensor


class _Part(NamedTuple):
    into: torch.Tensor
    data: torch.Tensor


class Copies:
    """Copies between tensors, made together by `run`; those that cannot be divided, at once."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(self, into: torch.Tensor, data: torch.Tensor) -> None:
        """Copy `data` into `into`, of the same shape."""
        into, data = into.detach(), data.detach()
        if not _can_be_divided(into, data):
            into.copy_(data)
            return
        step = PIECE_BYTES // into.element_size()
        into, data = into.view(-1), data.view(-1)
        for at in range(0, into.numel(), step):
            self._parts.append(_Part(into[at : at + step], data[at : at + step]))

    def run(self, num_threads: int) -> None:
        """Make them all; return when they are made."""
        parts, self._parts = self._parts, []
        shares = [parts[first::num_threads] for first in range(min(num_threads, len(parts)))]
        helpers = [threading.Thread(target=_copy, args=(share,)) for share in shares[1:]]
        for helper in helpers:
            helper.start()
        for share in shares[:1]:
            _copy(share)
        for helper in helpers:
            helper.join()


def _copy(parts: Sequence[_Part]) -> None:
    for part in parts:
        part.into.copy_(part.data)  # without the interpreter's lock


def _can_be_divided(into: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        into.is_cpu and data.is_cpu and into.dtype == data.dtype and into.nbytes > mmap.PAGESIZE
        and into.is_contiguous() and data.is_contiguous() and into.shape == data.shape
        and not (into.is_conj() or into.is_neg() or data.is_conj() or data.is_neg())
    )  # fmt: skip
