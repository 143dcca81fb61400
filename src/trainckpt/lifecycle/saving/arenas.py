"""Arenas: the memory in which this rank's shard files are laid out, again and again.

Which kind it is, and how many there are, `deciding/arena_choice.py` says from what there is. What
was chosen is said once, and again when it has to change. A snapshot whose bytes stand in shared
memory is found there by the next attempt, and by every other rank of this host.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.deciding.arena_choice import (
    HELD,
    MAX_ARENAS,
    OWN,
    PRIVATE,
    SHARED,
    STREAMED,
    Room,
    choose,
)
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.memory import available_bytes, budget_bytes, copy_threads
from trainckpt.lifecycle.saving.arena_words import mb, no_memory, where
from trainckpt.state.side import Side
from trainckpt.state.stage import private_memory
from trainckpt.tiers import host_memory, memfd
from trainckpt.tiers.arena import Own
from trainckpt.tiers.direct import copy
from trainckpt.tiers.memory import MemoryPlace, MemoryTaken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainckpt.lifecycle.run.options import Budget
    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.memory import Hold

_NUMBERS = range(6)  # a zombie of an earlier attempt may hold the first ones
SPARE_BYTES = 4 << 20  # the header, and what is only known when it is saved


class NoArena(Exception):
    """The budget allows no copy at all: the file is written from the live tensors."""


class Arenas:
    """The arenas of one rank.

    Attributes:
        newest: Folder of the snapshot whose bytes must not be overwritten while there is a choice.
        side: What copies to them from a GPU; all of them are registered there.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        local_ranks: Sequence[int],
        budget: Budget | None = None,
        hold: Hold | None = None,
    ) -> None:
        """`hold`: by which the supervisor holds memory; None: there is none that would."""
        self.newest: str | None = None
        self.side = Side(say=logger.warning)
        self.side.look_for_recorded()
        self._place = MemoryPlace.of(run)
        self._rank = rank
        self._ranks = tuple(local_ranks)
        self._budget = budget
        self._hold = hold
        self._is_supervised = hold is not None
        self._open: list[Arena] = []
        self._before: set[Path] = set()  # of another kind, that this attempt has taken
        self._filled: Arena | None = None  # by the save in flight
        self._private = memoryview(b"")
        self._said = ""
        self._preparing: threading.Thread | None = None
        self._standing: dict[str, Arena] = {}  # key of a committed file -> where it stands
        self._reading = threading.Lock()

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @property
    def are_ready(self) -> bool:
        """Whether there is memory that has been touched before: copying to it costs little."""
        self._wait()
        return bool(self._open) or len(self._private) > 0

    def unlock(self) -> None:
        """No memory is locked for a GPU until the next save: a dump would have to know of it."""
        self._wait()
        self.side.close()

    @property
    def descriptor(self) -> int | None:
        """Of the file that holds the save in flight; None if it is no file."""
        return self._filled.descriptor if self._filled is not None else None

    @property
    def copy_threads(self) -> int:
        """That may copy beside training."""
        return copy_threads(len(self._ranks), beside_training=True)

    @property
    def are_two(self) -> bool:
        """Whether the newest file is not overwritten before the next is complete."""
        return len(self._open) >= MAX_ARENAS

    @property
    def keep(self) -> bool:
        """Whether, besides, what stands in them is found when this process has ended."""
        return self.are_two and all(arena.outlives for arena in self._open)

    @property
    def outlive_supervisor(self) -> bool:
        """`keep`, also when the supervisor has ended, as it does after a stop."""
        return self.are_two and not any(arena.is_memfd for arena in self._open)

    def rest(self) -> memoryview:
        """No save comes for a while, perhaps a dump: what lies in no file system would be in it.

        Returns memory in which nothing is kept.
        """
        self.unlock()
        self._let_go([arena for arena in self._open if arena.is_memfd])
        return self._private

    def prepare(self, num_bytes: int) -> None:
        """Have memory for a file of about this size touched, by a thread, before it is needed.

        Once a file was laid out nothing is: that one may be on its way, and of another size.
        """
        if self._filled is not None:
            return
        size = num_bytes + SPARE_BYTES
        self._preparing = threading.Thread(
            target=self._touch, args=(size,), name="trainckpt-arena", daemon=True
        )
        self._preparing.start()

    def _touch(self, num_bytes: int) -> None:
        kind, number = choose(self._room(num_bytes), num_bytes)
        if kind in (PRIVATE, STREAMED):
            return
        self._find(kind, number)
        for arena in self._open:
            if not arena.holds():
                with contextlib.suppress(OSError):
                    arena.reserve(num_bytes, spare=True)
                    self.side.register(arena.reserved)

    def memory(self, num_bytes: int) -> memoryview:
        """So many bytes for the next shard file. What was given before the last is gone.

        Raises:
            NoArena: not within the budget.
        """
        self._wait()
        self._remove_before()
        kind, number = choose(self._room(num_bytes), num_bytes)
        self._filled = None
        if kind in (SHARED, HELD, OWN):
            given = self._shared(kind, num_bytes, number)
            if given is not None:
                self._replace_private(memoryview(b""))
                self.side.register(given.reserved)
                return given.memory
            kind = PRIVATE
        if kind == STREAMED:
            self._say(STREAMED, no_memory(num_bytes))
            raise NoArena
        self._close()
        if len(self._private) < num_bytes:
            self._replace_private(private_memory(num_bytes + SPARE_BYTES))
        self.side.register(self._private)
        self._say(
            PRIVATE,
            f"{mb(num_bytes)} of private memory: shared memory has no room for them, so no copy "
            "outlives the process",
        )
        return self._private[:num_bytes]

    def _replace_private(self, memory: memoryview) -> None:
        self.side.keep(self._private, 0)
        self._private = memory

    def publish(self, name: SnapshotName, file: str) -> None:
        """The save in flight is committed: its bytes may be found in memory too."""
        if self._filled is None or self._place is None:
            return
        folder = name.folder
        try:
            self._filled.publish(folder, file)
            self.newest = folder
            with self._reading:
                self._standing[f"{folder}/{file}"] = self._filled
        except OSError as error:  # its folder may have been taken away under us
            logger.warning("what was saved is not kept in memory: %s", error)
        self._tidy(name)

    def copy_from(self, key: str, first_byte: int, into: memoryview) -> bool:
        """Copy bytes of a committed file that stands here still; False if it does not.

        Any thread. A save that needs the arena waits for no more than this one copy.
        """
        with self._reading:
            arena = self._standing.get(key)
            end = first_byte + len(into)
            if arena is None or end > len(arena.memory):
                return False
            copy(into, arena.memory[first_byte:end])
            return True

    def _leave(self, arenas: Sequence[Arena]) -> None:
        """These are about to be overwritten, or given up."""
        with self._reading:
            kept = {key: arena for key, arena in self._standing.items() if arena not in arenas}
            self._standing = kept

    def _tidy(self, name: SnapshotName) -> None:
        """What earlier attempts left is not needed any more: this one has committed."""
        assert self._place is not None
        old = [folder for folder in self._place.folders() if _age([folder])[0] < name.attempt]
        with contextlib.suppress(OSError):
            if self._rank == self._ranks[0]:
                self._place.forget(old)
            self._place.keep_arenas(self._ranks, self._rank, [a.path for a in self._open])

    def close(self, *, keep: bool) -> None:
        """The attempt is over; `keep` what is in shared memory for the next."""
        self._wait()
        if not keep:
            self._leave(self._open)
            for arena in self._open:
                with contextlib.suppress(OSError):
                    arena.remove()
            self._open = []
        self._close()
        self.side.close()
        if not keep and self._place is not None:
            self._place.give_back(self._rank)  # what was laid out in before another kind was taken
            if not self._place.folders():
                self._place.remove()

    def _shared(self, kind: str, num_bytes: int, number: int) -> Arena | None:
        """An arena that holds nothing of worth, reserved; None if the system refuses it."""
        while (arena := self._pick(kind, number)) is not None:
            self._leave([arena])
            try:
                arena.reserve(num_bytes, spare=True)
            except OSError:  # others were faster, or the statistics wrong
                with contextlib.suppress(ValueError):
                    self._open.remove(arena)
                with contextlib.suppress(OSError):
                    arena.remove()
                number = min(number, len(self._open))
                continue
            self._filled = arena
            assert self._place is not None
            lies = where(self._place, arena, is_supervised=self._is_supervised)
            self._say(f"{kind} {number}", f"{number} x {mb(num_bytes)} of {lies}")
            return arena
        return None

    def _pick(self, kind: str, number: int) -> Arena | None:
        """An arena that may be overwritten, of at most so many."""
        self._find(kind, number)
        free = [arena for arena in self._open if self.newest not in arena.holds()]
        return min(free or self._open, key=lambda arena: _age(arena.holds()), default=None)

    def _find(self, kind: str, number: int) -> None:
        """Open this rank's arenas, those of earlier attempts first; make what is missing."""
        other = [arena for arena in self._open if arena.is_memfd == (kind == SHARED)]
        self._before |= {arena.path for arena in other if arena.outlives}
        self._let_go([*other, *(a for a in self._open if a not in other and not a.is_there)])
        taken = {arena.path for arena in self._open}
        for n in _NUMBERS:
            if len(self._open) >= number or self._place is None:
                break
            path = self._place.path_of(self._rank, n)
            with contextlib.suppress(MemoryTaken, OSError):
                if path not in taken and memfd.may_be(path, link=kind != SHARED):
                    self._open.append(self._opened(kind, n))
                    self._open[-1].keeps = self.side.keep
        too_many = max(len(self._open) - number, 0)
        for arena in sorted(self._open, key=lambda a: _age(a.holds()))[:too_many]:
            self._open.remove(arena)
            self._leave([arena])
            arena.remove()

    def _remove_before(self) -> None:
        """Memory of another kind, once the newest snapshot stands in this one: it is within no
        budget, and would be overwritten next.
        """
        if not (self._place and self._before and any(self.newest in a.holds() for a in self._open)):
            return
        for path in self._before - {arena.path for arena in self._open}:
            with contextlib.suppress(OSError):
                self._place.open_arena(path).remove()
                self._before.discard(path)

    def _opened(self, kind: str, n: int) -> Arena:
        """Raises `OSError` if it is taken, or as the system reports it."""
        assert self._place is not None
        path = self._place.path_of(self._rank, n)
        if kind == SHARED or (path.is_symlink() and not memfd.is_dead(path)):
            return self._place.arena(self._rank, n)
        if kind == HELD and self._hold is not None:
            try:
                return self._place.held_arena(self._rank, n, self._hold)
            except MemoryTaken:
                raise
            except OSError as error:
                self._hold = None  # nor will it be there for the next
                logger.warning("the supervisor holds no memory for this rank: %s", error)
        return Own(self._place)

    def _room(self, num_bytes: int) -> Room:
        files = [arena for arena in self._open if not arena.is_memfd]
        own = memfd.Taken(sum(arena.capacity_bytes for arena in files),
                    sum(a.capacity_bytes for a in self._open if a not in files))  # fmt: skip
        shared, free, beyond = self._place is not None, 0, ""
        if self._place is not None:
            try:
                own = own if self._open else self._place.left_by(self._rank)
                free = self._place.free_bytes // len(self._ranks)
            except OSError:
                shared = False
            if memfd.is_available():
                beyond = OWN if self._hold is None else HELD
        return Room(self._allowed(num_bytes, sum(own)), shared, free + own.tmpfs, beyond)

    def _allowed(self, num_bytes: int, shared_bytes: int) -> int | None:
        """What this rank may take in all, of which it may have some already."""
        budget = self._own_budget()
        taken = max(shared_bytes, len(self._private))
        if taken >= MAX_ARENAS * num_bytes or (left := self._left()) is None:
            return budget
        return taken + left if budget is None else min(budget, taken + left)

    def leave_room(self, more: int, beside: int | None) -> bool:
        """Whether so many bytes may be taken for something else.

        Args:
            more: Bytes.
            beside: What has been taken for such things before, all of which is to be within
                `memory_budget`; None: it need not be.
        """
        left, budget = self._left(), self._own_budget()
        if left is not None and more > left:
            return False
        own = sum(arena.capacity_bytes for arena in self._open)
        return budget is None or beside is None or own + beside + more <= budget

    def _own_budget(self) -> int | None:
        """This rank's share of `memory_budget`; None: nobody knows a limit."""
        if self._budget is None:
            return None
        budget = budget_bytes(self._budget.share, self._budget.num_bytes)
        return None if budget is None else budget // len(self._ranks)

    def _left(self) -> int | None:
        """This rank's share of what host and cgroups have left; None where nobody says."""
        if (left := available_bytes()) is None:
            return None
        return max(left // len(self._ranks) - host_memory.transient_bytes(), 0)

    def _close(self) -> None:
        self._let_go(list(self._open))
        self._filled = None

    def _let_go(self, arenas: Sequence[Arena]) -> None:
        """Others may have these, if they outlive this process."""
        self._leave(arenas)
        for arena in arenas:
            with contextlib.suppress(OSError):
                arena.close()
        self._open = [arena for arena in self._open if arena not in arenas]

    def _say(self, kind: str, what: str) -> None:
        if kind != self._said and kind == STREAMED:  # of any rank: all others' steps wait for it
            logger.warning("rank %d has %s", self._rank, what)
        elif kind != self._said and self._rank == 0:
            logger.info("each rank's saves are laid out in %s", what)
        self._said = kind


def _age(folders: Sequence[str]) -> tuple[int, int]:
    """Attempt and sequence of the newest snapshot that an arena holds; lowest if none."""
    names = [SnapshotName.parse(folder.rpartition("/")[2]) for folder in folders]
    return max(((n.attempt, n.sequence) for n in names if n), default=(0, 0))
