"""Overlap: tensors that only an optimizer's step changes are copied while training goes on.

    boundary        everything else is copied; a thread begins with these
    before a step   of any optimizer: the training thread copies what is left, and then steps
                    (`fence`)

What a GPU copies by itself (`side`) is all asked for at the boundary, and a step does not wait for
it, but is asked of the GPU behind it.

That nothing else changes them is not believed. A forward may write (`Embedding(max_norm=)`), and
what goes through `.data` no version counter sees (averages that are swapped in, clipped weights,
target networks). So version counters are compared; and some saves are proved: the live tensors are
digested at the boundary, and at the fence both copy and live tensor must still be what they were.
What a GPU copies is waited for at the boundary then, and must equal the live tensor at the fence.
What has changed spoils that save, and is copied at the boundary from then on.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainckpt.state.side import Side
from trainckpt.state.untraced import untraced
from trainckpt.tiers import past_cache
from trainckpt.tiers.direct import at_address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry

LEAST_BYTES = 64 << 10  # what is smaller is copied sooner than it is noted
CHUNK_BYTES = 16 << 20  # so that two threads can share a tensor
FENCE_WITHIN_S = 60.0  # a proof waits so long for a step; after that it is made beside training
LOOK_S = 0.5  # how often it is asked meanwhile whether anybody waits for the save
PROOF_PARTS = 4  # of each tensor: what is written to out of sight is most often all of it
IN_FLIGHT_S = 0.05  # an operation counts a tensor's version only when it has ended
LEAVE_S = 1.0  # an attempt that ends waits so long for copies that do not come


class Piece(NamedTuple):
    """Rows of one live tensor, and their place in the arena."""

    tensor: str
    source: torch.Tensor  # its bytes lie in one run
    target: int  # address

    @property
    def num_bytes(self) -> int:
        """Of the rows."""
        return self.source.numel() * self.source.element_size()


def only_stepped(captured: Captured, registry: Registry, kinds: Collection[str] = ()) -> set[str]:
    """Names of captured tensors that, as far as can be seen, only an optimizer's step changes.

    `kinds`: of devices, next to the CPU, that copy by themselves.
    """
    hooked = [o for o in registry.optimizers if calls_hooks(o.optimizer)]
    stepped = {id(p) for o in hooked for p in o.parameters()}
    found = {n for m in registry.models for n, p in m.parameters() if id(p) in stepped}
    groups = {o.name for o in hooked}
    names = found | {name for name, group in captured.groups.items() if group in groups}
    return {n for n in names & captured.tensors.keys() if _can(captured.tensors[n], kinds)}


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
        turn: Which of `PROOF_PARTS` of each piece is compared, modulo their number; None: all.
        num_threads: That copy, the one that calls `run` among them.
        side: What copies from a GPU by itself.

    Attributes:
        changed: Tensors that were written to meanwhile; complete once `run` has ended.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        proves: bool,
        turn: int | None = None,
        num_threads: int = 1,
        side: Side | None = None,
    ) -> None:
        self._side = side = side or Side()
        self.proves = proves
        self.changed: list[str] = []
        self._pieces = pieces
        self._versions = [piece.source._version for piece in pieces]
        by_device = [piece for piece in pieces if side.takes(piece.source, piece.target)]
        self._on_device = {piece.target for piece in by_device}
        self._flight = side.start([(piece.target, piece.source) for piece in by_device])
        on_host = [piece for piece in pieces if piece.target not in self._on_device]
        self._turn = turn
        self._digests: dict[int, bytes] = {}
        if proves:
            self._flight.wait()
            self._digests = {p.target: self._digest(p, p.source.data_ptr()) for p in on_host}
        self._chunks = list(_chunks(on_host))
        self._is_copied = bytearray(len(self._chunks))
        self._begun: dict[int, int] = {}  # number of a chunk -> thread that has begun with it
        self._next = self._front = 0  # none before it is to be begun with; is not copied
        self._helpers = num_threads - 1
        self._lock = threading.Lock()
        self._copied = threading.Event()
        self._fenced = threading.Event()
        if not on_host:
            self._copied.set()

    def run(self, is_urgent: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Copy everything; the saving thread. Gives, more than once, below which address all is.

        It has ended when `changed` says what must not be trusted.

        Args:
            is_urgent: Whether training waits for the save, here or elsewhere: no step is near.
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
        if not self._is_fenced_soon(is_urgent):
            with self._lock:
                self._check()

    def _is_fenced_soon(self, is_urgent: Callable[[], bool]) -> bool:
        if not self.proves:
            return self._fenced.wait(IN_FLIGHT_S)
        until_s = time.monotonic() + FENCE_WITHIN_S
        while not self._fenced.wait(LOOK_S):
            if time.monotonic() > until_s or is_urgent():
                return False
        return True

    def fence(self, limit_s: float | None = None) -> None:
        """Return when every copy is made; the training thread, before anything is changed.

        A GPU may still be at it, and changes nothing before. With a limit some copy may be missing
        then.
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
        """Whether no step need be held back any more."""
        return self._fenced.is_set() and self._flight.is_over

    def distrust(self) -> None:
        """From now on steps may be taken that nobody hears of: what a GPU copies is of no use."""
        if self._on_device:
            self.spoil()

    def spoil(self) -> None:
        """Nothing waits for these copies any more, so unless they are made they are of no use."""
        with self._lock:
            if not self._fenced.is_set():
                self.changed += [piece.tensor for piece in self._pieces]
                self._fenced.set()

    def _check(self) -> None:
        """Once."""
        if self._fenced.is_set():
            return
        for piece, version in zip(self._pieces, self._versions, strict=True):
            changed = piece.source._version != version
            if self.proves and not changed:
                changed = not self._is_as_it_was(piece)
            if changed:
                self.changed.append(piece.tensor)
        self._fenced.set()

    def _is_as_it_was(self, piece: Piece) -> bool:
        if piece.target in self._on_device:
            part = proof_part(piece.num_bytes, self._turn)
            return self._side.proves(piece.target, piece.source, *part)
        copied, was = self._digest(piece, piece.target), self._digests[piece.target]
        return copied == was and self._digest(piece, piece.source.data_ptr()) == was

    def _digest(self, piece: Piece, address: int) -> bytes:
        """Of what is compared of a piece: its bytes lie from `address` on."""
        first, end = proof_part(piece.num_bytes, self._turn)
        return _digest(address + first, end - first)

    def _copy(self) -> None:
        while self._copy_one():
            pass

    def _copy_one(self) -> bool:
        """Copy the next chunk; False if there is none that nobody has begun with."""
        try:
            with self._lock:
                while self._next in self._begun:
                    self._next += 1
                number = self._next
                if number == len(self._chunks):
                    return False
                self._begun[number] = threading.get_ident()
            past_cache.copy(*self._chunks[number])  # without the interpreter's lock
            with self._lock:
                self._is_copied[number] = True
                self._advance()
        except BaseException:  # a handler of the script's has raised, wherever this thread was
            self._put_back()
            raise
        return True

    def _put_back(self) -> None:
        """What this thread has begun with and not copied is left to the next that asks."""
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


class Fence:
    """Stands before every step of every optimizer of this process, while it is open."""

    def __init__(
        self,
        on_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
        side: Side | None = None,
    ) -> None:
        """`on_step` is called before each step, with its optimizer, when nothing is waited for."""
        self._overlapped: Overlapped | None = None
        self._on_step, self._side = on_step, side or Side()
        self._handle = register_optimizer_step_pre_hook(untraced(self._before_step))

    def guard(self, overlapped: Overlapped) -> None:
        """From now on steps wait for these copies."""
        self._overlapped = overlapped

    def settle(self, limit_s: float | None = None) -> None:
        """The training thread changes nothing just now: finish what is under way."""
        overlapped = self._overlapped
        if overlapped is not None:
            overlapped.fence(limit_s)
            if overlapped.is_copied:  # else another step, on another stream, must wait as well
                self._overlapped = None

    def close(self) -> None:
        """No step waits any more."""
        self.settle(LEAVE_S)
        if self._overlapped is not None:
            self._overlapped.spoil()
        self._handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._side.is_recording():  # no step yet; but those to come will not be heard of
            if self._overlapped is not None:
                self._overlapped.distrust()
            return
        if self._overlapped is not None:
            self.settle()
        self._on_step(optimizer)


def proof_part(num_bytes: int, turn: int | None) -> tuple[int, int]:
    """First byte of what is compared of so many in this turn, and the one behind its last: pure."""
    if turn is None:
        return 0, num_bytes
    part = turn % PROOF_PARTS
    return part * num_bytes // PROOF_PARTS, (part + 1) * num_bytes // PROOF_PARTS


def _can(tensor: torch.Tensor, kinds: Collection[str]) -> bool:
    """Whether its bytes can be copied by a thread, without asking torch, or by its device, if that
    is of one of these kinds.
    """
    return (
        (tensor.is_cpu or tensor.device.type in kinds)
        and tensor.layout is torch.strided
        and tensor.nbytes >= LEAST_BYTES
        and tensor.is_contiguous()
    )


def _chunks(pieces: Iterable[Piece]) -> Iterator[tuple[int, int, int]]:
    """Where to, from where, how many bytes."""
    for piece in pieces:
        source, num_bytes = piece.source.data_ptr(), piece.num_bytes
        for at in range(0, num_bytes, CHUNK_BYTES):
            yield piece.target + at, source + at, min(CHUNK_BYTES, num_bytes - at)


def _digest(address: int, num_bytes: int) -> bytes:
    return bytes(xxhash.xxh3_128(at_address(address, num_bytes)).digest())
