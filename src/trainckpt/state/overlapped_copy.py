"""Copy tensors changed only by an optimizer step while training goes on.

    boundary        every other tensor is copied; a thread begins with these
    before a step   of any optimizer: the training thread copies the rest, and then steps (`fence`)

Copies made by a GPU itself (`device_copy`) are all submitted at the boundary. A step does not wait
for them: the GPU runs it after the copies.

Tensors may change outside a step all the same. A forward may write (`Embedding(max_norm=)`), and
writes through `.data` leave the version counter alone (averages swapped in, clipped weights, target
networks). So version counters are compared, and some saves are proved. A proof digests the live
tensors at the boundary; at the fence both the copy and the live tensor must match. A proof of GPU
copies waits for them at the boundary; at the fence each must equal the live tensor. A changed
tensor spoils its save, and is copied at the boundary from then on.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainckpt.state.capture_cache import LEAST_BYTES
from trainckpt.state.device_copy import DeviceCopier
from trainckpt.state.step_hooks import calls_hooks, untraced
from trainckpt.storage.direct_io import at_address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry

CHUNK_BYTES = 16 << 20  # so that two threads can share a tensor
FENCE_WITHIN_S = 5.0  # a proof waits so long for a step; then it is made during training
LOOK_S = 0.5  # interval of looking for a chunk that another thread left
IN_FLIGHT_S = 0.05  # an operation raises a tensor's version only at its end
LEAVE_S = 1.0  # an ending attempt waits so long for missing copies


class PendingCopy(NamedTuple):
    """Rows of one live tensor, and their target in the arena."""

    tensor: str
    source: torch.Tensor  # its bytes lie in one run
    target: int  # address

    @property
    def num_bytes(self) -> int:
        """Return the size of the rows in bytes."""
        return self.source.numel() * self.source.element_size()


def only_stepped(captured: Captured, registry: Registry, kinds: Collection[str] = ()) -> set[str]:
    """Return the names of captured tensors changed only by an optimizer step, as far as visible.

    `kinds`: kinds of devices, besides the CPU, with copies of their own.
    """
    small = frozenset().union(*(block.small for block in captured.blocks))
    names = [n for n in captured.tensors if n not in small and _can(captured.tensors[n], kinds)]
    if not names:
        return set()
    hooked = [o for o in registry.optimizers if calls_hooks(o.optimizer)]
    stepped = {id(p) for o in hooked for p in o.parameters()}
    found = {n for m in registry.models for n, p in m.parameters() if id(p) in stepped}
    groups = {o.name for o in hooked}
    return {name for name in names if name in found or captured.groups.get(name) in groups}


class OverlappedCopy:
    """The copies of one save made while training goes on.

    Args:
        pieces: In the order of their target addresses.
        proves: Compare copies and live tensors with their state at the boundary.
        num_threads: Number of copying threads, including the caller of `run`.
        device_copier: Copies from a GPU.

    Attributes:
        changed: Names of tensors written to meanwhile; complete once `run` has ended.
    """

    def __init__(
        self,
        pieces: Sequence[PendingCopy],
        *,
        proves: bool,
        num_threads: int = 1,
        device_copier: DeviceCopier | None = None,
    ) -> None:
        self._device_copier = device_copier = device_copier or DeviceCopier()
        self.proves = proves
        self.changed: list[str] = []
        self._pieces = pieces
        self._versions = [piece.source._version for piece in pieces]
        by_device = [piece for piece in pieces if device_copier.takes(piece.source, piece.target)]
        self._on_device = {piece.target for piece in by_device}
        self._flight = device_copier.start([(piece.target, piece.source) for piece in by_device])
        on_host = [piece for piece in pieces if piece.target not in self._on_device]
        self._digests: dict[int, bytes] = {}
        if proves:
            self._flight.wait()
            self._digests = {p.target: _digest(p.source.data_ptr(), p.num_bytes) for p in on_host}
        self._chunks = list(_chunks(on_host))
        self._is_copied = bytearray(len(self._chunks))
        self._begun: dict[int, int] = {}  # number of a chunk -> thread copying it
        self._next = self._front = 0  # all chunks before `_next` begun; all before `_front` copied
        self._helpers = num_threads - 1
        self._lock = threading.Lock()
        self._copied = threading.Event()
        self._fenced = threading.Event()
        if not on_host:
            self._copied.set()

    def run(self) -> Iterator[int]:
        """Copy everything, from the saving thread. Yield addresses below which all is copied.

        After the last one `changed` is complete.
        """
        for _ in range(self._helpers):
            threading.Thread(target=self._copy, name="trainckpt-copy", daemon=True).start()
        self._flight.wait()
        while not self._copied.is_set():
            while self._copy_one():
                if self._front < len(self._chunks):
                    yield self._chunks[self._front][0]
            self._copied.wait(LOOK_S)  # meanwhile another may leave its chunk to this thread
        if self._pieces:
            yield self._pieces[-1].target + self._pieces[-1].num_bytes
        if not self._fenced.wait(FENCE_WITHIN_S if self.proves else IN_FLIGHT_S):
            with self._lock:
                self._check()

    def fence(self, limit_s: float | None = None) -> None:
        """Return when every copy is made; training thread, before any change.

        GPU copies may still be pending: later GPU work waits for them. With a limit in seconds
        some copies may be missing on return.
        """
        self._flight.hold()
        if self._fenced.is_set():
            return
        self._copy()
        if self._copied.wait(limit_s):
            with self._lock:
                self._check()

    @property
    def is_copied(self) -> bool:
        """Return True if no step needs to wait any more."""
        return self._fenced.is_set() and self._flight.is_over

    def distrust(self) -> None:
        """Spoil GPU copies: later steps may call no hook."""
        if self._on_device:
            self.spoil()

    def spoil(self) -> None:
        """Abandon the copies: the save fails unless `fence` already passed."""
        with self._lock:
            if not self._fenced.is_set():
                self.changed += [piece.tensor for piece in self._pieces]
                self._fenced.set()

    def _check(self) -> None:
        if self._fenced.is_set():
            return
        for piece, version in zip(self._pieces, self._versions, strict=True):
            changed = piece.source._version != version
            if self.proves and not changed:
                changed = not self._is_as_it_was(piece)
            if changed:
                self.changed.append(piece.tensor)
        self._fenced.set()

    def _is_as_it_was(self, piece: PendingCopy) -> bool:
        if piece.target in self._on_device:
            return self._device_copier.proves(piece.target, piece.source)
        was = self._digests[piece.target]
        live = piece.source.data_ptr()
        return all(_digest(address, piece.num_bytes) == was for address in (piece.target, live))

    def _copy(self) -> None:
        while self._copy_one():
            pass

    def _copy_one(self) -> bool:
        """Copy the next chunk; False if every chunk has been begun."""
        try:
            with self._lock:
                while self._next in self._begun:
                    self._next += 1
                number = self._next
                if number == len(self._chunks):
                    return False
                self._begun[number] = threading.get_ident()
            ctypes.memmove(*self._chunks[number])  # without the interpreter's lock
            with self._lock:
                self._is_copied[number] = True
                self._advance()
        except BaseException:  # a signal handler of the script raised in this thread
            self._put_back()
            raise
        return True

    def _put_back(self) -> None:
        """Release the chunks begun but not copied by this thread to the next caller."""
        me = threading.get_ident()
        with self._lock:
            mine = [n for n, by in self._begun.items() if by == me and not self._is_copied[n]]
            for number in mine:
                del self._begun[number]
            self._next = min([self._next, *mine])
            self._advance()

    def _advance(self) -> None:
        while self._front < len(self._chunks) and self._is_copied[self._front]:
            self._front += 1
        if self._front == len(self._chunks):
            self._copied.set()


class StepFence:
    """A hook before every step of every optimizer of this process."""

    def __init__(
        self,
        on_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
        device_copier: DeviceCopier | None = None,
        on_wait: Callable[[float], object] = lambda _: None,
    ) -> None:
        """Install the hook. It calls `on_step` with the optimizer, after any wait, and `on_wait`
        with the moment at which the wait began."""
        self._on_wait = on_wait
        self._overlapped: OverlappedCopy | None = None
        self._on_step, self._device_copier = on_step, device_copier or DeviceCopier()
        self._handle = register_optimizer_step_pre_hook(untraced(self._before_step))

    def guard(self, overlapped: OverlappedCopy) -> None:
        """Make steps wait for these copies from now on."""
        self._overlapped = overlapped

    def settle(self, limit_s: float | None = None) -> None:
        """Finish pending copies while the training thread changes nothing."""
        overlapped = self._overlapped
        if overlapped is not None:
            overlapped.fence(limit_s)
            if overlapped.is_copied:  # else another step, on another stream, must wait as well
                self._overlapped = None

    def close(self) -> None:
        """Remove the hook, so that no step waits any more."""
        self.settle(LEAVE_S)
        if self._overlapped is not None:
            self._overlapped.spoil()
        self._handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._device_copier.is_recording():  # no step yet, but replayed steps will call no hook
            if self._overlapped is not None:
                self._overlapped.distrust()
            return
        if self._overlapped is not None:
            begun_s = time.monotonic()
            self.settle()
            self._on_wait(begun_s)
        self._on_step(optimizer)


def _can(tensor: torch.Tensor, kinds: Collection[str]) -> bool:
    """Return True if the tensor's bytes can be copied by address or by its device.

    A device copies if its kind is among `kinds`.
    """
    return (
        (tensor.is_cpu or tensor.device.type in kinds)
        and tensor.layout is torch.strided
        and tensor.nbytes >= LEAST_BYTES
        and tensor.is_contiguous()
    )


def _chunks(pieces: Iterable[PendingCopy]) -> Iterator[tuple[int, int, int]]:
    """Yield target address, source address and number of bytes."""
    for piece in pieces:
        source, num_bytes = piece.source.data_ptr(), piece.num_bytes
        for at in range(0, num_bytes, CHUNK_BYTES):
            yield piece.target + at, source + at, min(CHUNK_BYTES, num_bytes - at)


def _digest(address: int, num_bytes: int) -> bytes:
    return bytes(xxhash.xxh3_128(at_address(address, num_bytes)).digest())
