"""Copies between tensors, made by all cores that a rank may use; the caller waits for them.

Huge pages for what is copied to were tried, and left out: on virtual machines that give free memory
back to their host, they are those that have to be fetched again first, so it took twice as long.
"""

from __future__ import annotations

import mmap
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.state import pinned
from trainckpt.tiers import past_cache
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trainckpt.state.given import Proof

PIECE_BYTES = 8 << 20  # of one copy, so that threads can share a tensor
_NOT_COPIED = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


class Copies:
    """Copies between tensors, made together by `run`; those that cannot be divided, at once."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []
        self._uploads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._counted: list[torch.Tensor] = []  # of whose change torch is told

    def add(self, into: torch.Tensor, data: torch.Tensor, proof: Proof | None = None) -> None:
        """Copy `data` into `into`, of the same shape; unless the proof of `data` holds there."""
        into, data = as_copied(into.detach()), as_copied(data.detach())
        if pinned.can_upload(into, data):
            self._uploads.append((into, data))
        elif not _can_be_divided(into, data):
            into.copy_(data)
        elif proof is not None:
            self._parts.append(partial(_prove_or_copy, into, data, proof))
        elif _may_go_past_cache(into, data):
            self.add_past_cache(into.data_ptr(), data)
            self._counted.append(into)
        else:
            step = PIECE_BYTES // into.element_size()
            into, data = into.view(-1), data.view(-1)
            for at in range(0, into.numel(), step):
                self._parts.append(partial(into[at : at + step].copy_, data[at : at + step]))

    def add_past_cache(self, target: int, source: torch.Tensor) -> None:
        """Copy a tensor of the host, whose bytes lie in one run, to an address; see there."""
        for first in range(0, source.nbytes, PIECE_BYTES):
            self._parts.append(partial(_copy_past_cache, target, source, first))

    def run(self, num_threads: int) -> None:
        """Make them all; return when they are made."""
        uploads, self._uploads = self._uploads, []
        try:
            self._make(num_threads)
            pinned.upload(uploads)
        finally:
            self._count()

    def _count(self) -> None:
        """Tell torch of what was written past it."""
        counted, self._counted = self._counted, []
        if counted:
            from torch.autograd.graph import increment_version

            for tensor in counted:
                if not tensor.is_inference():  # of those it counts nothing
                    increment_version(tensor)

    def _make(self, num_threads: int) -> None:
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


def as_copied(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes where torch knows how many bits a number has and copies none."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.view(torch.uint8) if name in _NOT_COPIED else tensor


def _prove_or_copy(into: torch.Tensor, data: torch.Tensor, proof: Proof) -> None:
    if not proof.holds(into):
        into.copy_(data)


def _copy_past_cache(target: int, source: torch.Tensor, first: int) -> None:
    num_bytes = min(PIECE_BYTES, source.nbytes - first)
    past_cache.copy(target + first, source.data_ptr() + first, num_bytes)


def _may_go_past_cache(into: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether their bytes are all there is to them, and that pays; not to where they are copied."""
    import torch

    are_plain = all(type(tensor) is torch.Tensor for tensor in (into, data))
    if not are_plain or into.data_ptr() == data.data_ptr():
        return False
    return past_cache.pays(into.data_ptr(), into.nbytes)


def _can_be_divided(into: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        into.is_cpu and data.is_cpu and into.dtype == data.dtype and into.nbytes > mmap.PAGESIZE
        and into.is_contiguous() and data.is_contiguous() and into.shape == data.shape
        and not (into.is_conj() or into.is_neg() or data.is_conj() or data.is_neg())
    )  # fmt: skip
