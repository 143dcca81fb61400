"""Copies between tensors, made by all cores that a rank may use; the caller waits for them.

Huge pages for what is copied to were tried, and left out: on virtual machines that give free memory
back to their host, they are those that have to be fetched again first, so it took twice as long.
"""

from __future__ import annotations

import mmap
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trainckpt.state.given import Proof

PIECE_BYTES = 8 << 20  # of one copy, so that threads can share a tensor


class Copies:
    """Copies between tensors, made together by `run`; those that cannot be divided, at once."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []

    def add(self, into: torch.Tensor, data: torch.Tensor, proof: Proof | None = None) -> None:
        """Copy `data` into `into`, of the same shape; unless the proof of `data` holds there."""
        into, data = into.detach(), data.detach()
        if not _can_be_divided(into, data):
            into.copy_(data)
        elif proof is not None:
            self._parts.append(partial(_prove_or_copy, into, data, proof))
        else:
            step = PIECE_BYTES // into.element_size()
            into, data = into.view(-1), data.view(-1)
            for at in range(0, into.numel(), step):
                self._parts.append(partial(into[at : at + step].copy_, data[at : at + step]))

    def run(self, num_threads: int) -> None:
        """Make them all; return when they are made."""
        parts, self._parts = self._parts, []
        if num_threads < 2 or len(parts) < 2:
            for part in parts:
                part()
            return
        import torch

        with Workers(num_threads, "trainckpt-copy") as workers:  # without the interpreter's lock
            # In a forked process the first thread that asks has torch's pool made anew; two at once
            # fail ("Invalid thread pool!"). To set the number here would change MKL's mode as well.
            workers.submit(torch.get_num_threads)
            workers.settle()
            for part in parts:
                workers.submit(part)
            workers.settle()


def _prove_or_copy(into: torch.Tensor, data: torch.Tensor, proof: Proof) -> None:
    if not proof.holds(into):
        into.copy_(data)


def _can_be_divided(into: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        into.is_cpu and data.is_cpu and into.dtype == data.dtype and into.nbytes > mmap.PAGESIZE
        and into.is_contiguous() and data.is_contiguous() and into.shape == data.shape
        and not (into.is_conj() or into.is_neg() or data.is_conj() or data.is_neg())
    )  # fmt: skip
