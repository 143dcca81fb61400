"""Copy between tensors with all cores of a rank; the caller waits."""

from __future__ import annotations

import mmap
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainckpt.state import device_copy
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.state.zero_copy import VerifiedTensor

PIECE_BYTES = 8 << 20  # of one copy, so that threads can share a tensor
# Types of less than 8 bits; older releases of torch lack some.
_NOT_COPIED = frozenset(
    getattr(torch, name)
    for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
    if hasattr(torch, name)
)


class CopyBatch:
    """Copies between tensors, made together by `run`."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []
        self._small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # targets and sources
        self._uploads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(
        self, into: torch.Tensor, data: torch.Tensor, proof: VerifiedTensor | None = None
    ) -> None:
        """Copy `data` into `into`, of the same shape, unless the proof of `data` holds there."""
        into, data = as_copied(into), as_copied(data)
        if device_copy.can_upload(into, data):
            self._uploads.append((into, data))
        elif into.is_conj() or into.is_neg():
            into.copy_(data)  # torch refuses them in lists
        elif not _can_be_divided(into, data):
            self._small[0].append(into)
            self._small[1].append(data)
        elif proof is not None:
            self._parts.append(partial(_prove_or_copy, into, data, proof))
        else:
            step = PIECE_BYTES // into.element_size()
            into, data = into.detach().view(-1), data.detach().view(-1)
            for at in range(0, into.numel(), step):
                self._parts.append(partial(into[at : at + step].copy_, data[at : at + step]))

    @torch.no_grad()
    def run(self, num_threads: int) -> None:
        """Make all copies, and return when they are complete. Call it once."""
        if self._small[0]:
            torch._foreach_copy_(*self._small)  # one call: a model has thousands
        if num_threads < 2 or len(self._parts) < 2:
            for part in self._parts:
                part()
        else:
            with Workers(num_threads, "trainckpt-copy") as workers:  # without the interpreter lock
                # In a forked process the first call remakes torch's pool; two calls at once fail
                # ("Invalid thread pool!"). To set the number here would change MKL's mode as well.
                workers.submit(torch.get_num_threads)
                workers.settle()
                for part in self._parts:
                    workers.submit(part)
                workers.settle()
        device_copy.upload(self._uploads)


def as_copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or its bytes for types of less than 8 bits: torch cannot copy those."""
    return tensor.view(torch.uint8) if tensor.dtype in _NOT_COPIED else tensor


def _prove_or_copy(into: torch.Tensor, data: torch.Tensor, proof: VerifiedTensor) -> None:
    if not proof.holds(into):
        into.copy_(data)


def _can_be_divided(into: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        into.is_cpu
        and data.is_cpu
        and into.dtype == data.dtype
        and into.nbytes > mmap.PAGESIZE
        and into.is_contiguous()
        and data.is_contiguous()
        and into.shape == data.shape
        and not (into.is_conj() or into.is_neg() or data.is_conj() or data.is_neg())
    )
