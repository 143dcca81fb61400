"""Overlap: tensors that only an optimizer's step changes are copied while training goes on.

    boundary        everything else is copied; a thread begins with these
    before a step   of any optimizer: the training thread copies what is left, and then steps
                    (`fence`)

That nothing else changes them is not believed. A forward may write (`Embedding(max_norm=)`), and
what goes through `.data` no version counter sees (averages that are swapped in, clipped weights,
target networks). So version counters are compared; and some saves are proved: the live tensors are
digested at the boundary, and at the fence both copy and live tensor must still be what they were.
What has changed spoils that save, and is copied at the boundary from then on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry

LEAST_BYTES = 64 << 10  # what is smaller is copied sooner than it is noted
CHUNK_BYTES = 16 << 20  # so that two threads can share a tensor
FENCE_WITHIN_S = 60.0  # a proof waits so long for a step; after that it is made beside training
IN_FLIGHT_S = 0.05  # an operation counts a tensor's version only when it has ended

_memcmp = ctypes.CDLL(None if os.name == "posix" else "msvcrt").memcmp


@dataclass(frozen=True)
class Piece:
    """Rows of one live tensor, and their place in the arena."""

    tensor: str
    source: torch.Tensor  # its bytes lie in one run on the CPU
    target: int  # address

    @property
    def num_bytes(self) -> int:
        """Of the rows."""
        return self.source.numel() * self.source.element_size()


def only_stepped(captured: Captured, registry: Registry) -> set[str]:
    """Names of captured tensors that, as far as can be seen, only an optimizer's step changes."""
    hooked = [o for o in registry.optimizers if calls_hooks(o.optimizer)]
    stepped = {id(p) for o in hooked for p in o.parameters()}
    found = {n for m in registry.models for n, p in m.parameters() if id(p) in stepped}
    groups = {o.name for o in hooked}
    names = found | {name for name, group in captured.groups.items() if group in groups}
    return {name for name in names & captured.tensors.keys() if _can(captured.tensors[name])}


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the hooks before it: an instance's own `step` may not.

    Torch's learning rate schedulers put one there that does.
    """
    own = vars(optimizer).get("step")
    passes = own is None or hasattr(own, "_wrapped_by_lr_sched")
    return passes and hasattr(type(optimizer).step, "hooked")


class Overlapped:
    """The copies of one save that are made while training goes on.

    Args:
        pieces: In the order of their places in memory.
        proves: Whether copies and live tensors are compared with what there was at the boundary.
        num_threads: That copy, the one that calls `run` among them.

    Attributes:
        changed: Tensors that were written to meanwhile; complete once `run` has ended.
    """

    def __init__(self, pieces: Sequence[Piece], *, proves: bool, num_threads: int = 1) -> None:
        self.proves = proves
        self.changed: list[str] = []
        self._pieces = pieces
        self._versions = [piece.source._version for piece in pieces]
        self._digests = (
            [_digest(p.source.data_ptr(), p.num_bytes) for p in pieces] if proves else []
        )
        self._chunks = list(_chunks(pieces))
        self._is_copied = bytearray(len(self._chunks))
        self._next = self._front = 0  # the first that nobody has begun with; that is not copied
        self._helpers = num_threads - 1
        self._lock = threading.Lock()
        self._copied = threading.Event()
        self._fenced = threading.Event()
        if not pieces:
            self._copied.set()

    def run(self) -> Iterator[int]:
        """Copy everything; the saving thread. Gives, more than once, below which address all is.

        It has ended when `changed` says what must not be trusted.
        """
        for _ in range(self._helpers):
            threading.Thread(target=self._copy, name="trainckpt-copy", daemon=True).start()
        while self._copy_one():
            if self._front < len(self._chunks):
                yield self._chunks[self._front][0]
        self._copied.wait()
        if self._chunks:
            yield self._chunks[-1][0] + self._chunks[-1][2]
        if not self._fenced.wait(FENCE_WITHIN_S if self.proves else IN_FLIGHT_S):
            with self._lock:
                if not self._fenced.is_set():
                    self._check()

    def fence(self) -> None:
        """Return when every copy is made; the training thread, before anything is changed."""
        if self._fenced.is_set():
            return
        self._copy()
        self._copied.wait()
        with self._lock:
            self._check()

    def _check(self) -> None:
        """Once."""
        if self._fenced.is_set():
            return
        for number, (piece, version) in enumerate(zip(self._pieces, self._versions, strict=True)):
            changed = piece.source._version != version
            if self.proves and not changed:
                changed = not self._is_as_it_was(number, piece)
            if changed:
                self.changed.append(piece.tensor)
        self._fenced.set()

    def _is_as_it_was(self, number: int, piece: Piece) -> bool:
        return _digest(piece.target, piece.num_bytes) == self._digests[number] and _equal(piece)

    def _copy(self) -> None:
        while self._copy_one():
            pass

    def _copy_one(self) -> bool:
        """Copy the next chunk; False if there is none that nobody has begun with."""
        with self._lock:
            number = self._next
            if number == len(self._chunks):
                return False
            self._next += 1
        ctypes.memmove(*self._chunks[number])  # without the interpreter's lock
        with self._lock:
            self._is_copied[number] = True
            while self._front < len(self._chunks) and self._is_copied[self._front]:
                self._front += 1
            if self._front == len(self._chunks):
                self._copied.set()
        return True


class Fence:
    """Stands before every step of every optimizer of this process, while it is open."""

    def __init__(self, on_step: Callable[[torch.optim.Optimizer], None] = lambda _: None) -> None:
        """`on_step` is called before each step, with its optimizer, when nothing is waited for."""
        self._overlapped: Overlapped | None = None
        self._on_step = on_step
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def guard(self, overlapped: Overlapped) -> None:
        """From now on steps wait for these copies."""
        self._overlapped = overlapped

    def settle(self) -> None:
        """The training thread changes nothing just now: finish what is under way."""
        overlapped, self._overlapped = self._overlapped, None
        if overlapped is not None:
            overlapped.fence()

    def close(self) -> None:
        """No step waits any more."""
        self.settle()
        self._handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._overlapped is not None:
            self.settle()
        self._on_step(optimizer)


def _can(tensor: torch.Tensor) -> bool:
    """Whether its bytes can be copied by a thread, without asking torch."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() >= LEAST_BYTES
    )


def _chunks(pieces: Iterable[Piece]) -> Iterator[tuple[int, int, int]]:
    """Where to, from where, how many bytes."""
    for piece in pieces:
        source, num_bytes = piece.source.data_ptr(), piece.num_bytes
        for at in range(0, num_bytes, CHUNK_BYTES):
            yield piece.target + at, source + at, min(CHUNK_BYTES, num_bytes - at)


def _digest(address: int, num_bytes: int) -> bytes:
    data = (ctypes.c_ubyte * num_bytes).from_address(address)
    return bytes(xxhash.xxh3_128(memoryview(data)).digest())


def _equal(piece: Piece) -> bool:
    """By their bytes: a NaN equals itself."""
    return all(not _compare(*chunk) for chunk in _chunks([piece]))


def _compare(target: int, source: int, num_bytes: int) -> int:
    """0 if the bytes are equal; without the interpreter's lock."""
    return int(
        _memcmp(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes))
    )
