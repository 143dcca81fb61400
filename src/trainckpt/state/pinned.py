"""Copy between devices and ordinary memory through two pinned buffers.

    brought_back    device -> host: the GPU fills one buffer while the caller reads the other
    upload          host -> device: this thread fills one buffer while the GPU reads the other

Without them the driver copies through a small buffer of its own, at a fraction of the link's rate,
while this thread waits. On devices other than CUDA, or without pinned memory, the same copies are
made one after the other.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from trainckpt.format.shard_file import LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PART_BYTES = 16 << 20  # size of one buffer


def brought_back(source: torch.Tensor, first: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield bytes of a contiguous tensor, in parts on the CPU, each with its first byte's number.

    A part is invalid when the next is taken.
    """
    flat = source.detach().reshape(-1).view(torch.uint8)
    num_parts = -(-(end - first) // PART_BYTES)
    size = min(PART_BYTES, end - first)
    buffers = [new_buffer(size, pinned=source.is_cuda) for _ in range(min(num_parts, 2))]

    def fetch(number: int) -> tuple[int, torch.Tensor, torch.cuda.Event | None]:
        at = first + number * PART_BYTES
        into = buffers[number % 2][: min(PART_BYTES, end - at)]
        with _on(source):
            into.copy_(flat[at : at + len(into)], non_blocking=True)
            return at, into, _asked(source)

    following = fetch(0) if num_parts else None
    for number in range(num_parts):
        assert following is not None
        at, part, done = following
        # Into the buffer of the part before: the caller no longer uses it.
        following = fetch(number + 1) if number + 1 < num_parts else None
        _wait(done, source)
        yield at, part


@torch.no_grad()
def on_host(source: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same values on the CPU."""
    if source.is_cpu or not source.is_contiguous():
        return source.detach().cpu().contiguous()
    into = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    flat = into.reshape(-1).view(torch.uint8)
    for at, part in brought_back(source, 0, source.nbytes):
        flat[at : at + part.numel()].copy_(part)
    return into


def can_upload(into: torch.Tensor, data: torch.Tensor) -> bool:
    """Return True if `upload` makes this copy: all bytes of `data`, from the CPU to a GPU."""
    return (
        into.is_cuda
        and data.is_cpu
        and into.dtype == data.dtype
        and into.shape == data.shape
        and into.is_contiguous()
        and data.is_contiguous()
        and not (into.is_conj() or into.is_neg() or data.is_conj() or data.is_neg())
    )


@torch.no_grad()
def upload(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, on this thread's stream; return when all are copied.

    Both are contiguous, of one type and shape. Each tensor is one copy, or one for each buffer it
    fills.
    """
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for into, data in copies:
        if into.nbytes:
            by_device.setdefault(into.device, []).append((into, data))
    for device_copies in by_device.values():
        _upload(device_copies)


def _upload(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    some = copies[0][0]
    size = min(PART_BYTES, sum(into.nbytes + LINE_BYTES for into, _ in copies))
    buffers = [new_buffer(size, pinned=some.is_cuda) for _ in range(2)]
    read: list[torch.cuda.Event | None] = [None, None]  # when the GPU has read each
    turn = filled = 0
    with _on(some):
        for into, data in copies:
            target, source = (t.detach().reshape(-1).view(torch.uint8) for t in (into, data))
            done = 0
            while done < source.numel():
                if filled >= size:
                    read[turn] = _asked(some)
                    turn, filled = 1 - turn, 0
                    _wait(read[turn], some)
                step = min(source.numel() - done, size - filled)
                part = buffers[turn][filled : filled + step].copy_(source[done : done + step])
                target[done : done + step].copy_(part, non_blocking=True)
                done, filled = done + step, filled + -(-step // LINE_BYTES) * LINE_BYTES
        _wait(_asked(some), some)  # the script may read it on any stream


def new_buffer(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Return fresh bytes on the CPU; `pinned`: page-locked for the GPU, if the driver allows it."""
    if pinned:
        with contextlib.suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _asked(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event after all work of this thread's stream so far; None without CUDA."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _wait(event: torch.cuda.Event | None, tensor: torch.Tensor) -> None:
    if event is not None:
        with _on(tensor):
            event.synchronize()
