"""Arenas: the memory in which a rank lays out its shard files, save after save.

`choose` picks their kind and number, a pure function of the memory available:

    two in shared memory    one holds the newest snapshot while the next is captured into the other
    one in shared memory    the newest is overwritten while it stands in the run directory only
    memory of its own       as fast; gone with the process
    private memory          where the system has nothing better; as above, and not shared with the
                            writer process
    none                    not even that fits the budget: training waits while the file is written

`Arenas` logs the choice once, and again when it changes. The next attempt, and every other rank of
this host, finds a snapshot's bytes in shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.format.names import SnapshotName, shard_file_name
from trainckpt.state.device_copy import DeviceCopier
from trainckpt.state.staging import Shard
from trainckpt.storage import host_resources
from trainckpt.storage.arena import Own, has_memfd
from trainckpt.storage.direct_io import copy_bytes, private_memory
from trainckpt.storage.host_resources import available_bytes, budget_bytes, copy_threads
from trainckpt.storage.shared_memory import SharedMemoryDir, why_unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainckpt.attempt.options import Budget
    from trainckpt.attempt.save_handle import CommitEvent
    from trainckpt.storage.arena import Arena


MAX_ARENAS = 2
SHARED, OWN, PRIVATE, STREAMED = "shared", "own", "private", "streamed"


@dataclass(frozen=True)
class MemorySpace:
    """Memory that one rank may use.

    Attributes:
        budget: Bytes of memory for all its arenas, by the option and by the memory left; None: no
            limit is known.
        shared: There is shared memory at all.
        shared_bytes: Bytes free there, including this rank's own.
        beyond: There is memory outside file systems, of the rank's own.
    """

    budget: int | None
    shared: bool
    shared_bytes: int = 0
    beyond: bool = False


def choose(room: MemorySpace, num_bytes: int) -> tuple[str, int]:
    """Return the kind of arenas for files of this size, and their number. Pure."""
    budget = room.budget if room.budget is not None else MAX_ARENAS * num_bytes
    most = min(budget // num_bytes, MAX_ARENAS)
    shared = min(room.shared_bytes // num_bytes, most) if room.shared else 0
    if shared:
        return SHARED, shared
    # Only the budget limits memory outside file systems.
    if most and room.beyond and room.budget is not None:
        return OWN, most
    return (PRIVATE, 1) if most else (STREAMED, 0)


def mb(num_bytes: int) -> str:
    """Return a number of bytes as text in megabytes."""
    return f"{num_bytes / 1e6:.1f} MB"


_NUMBERS = range(6)  # a zombie of an earlier attempt may hold the first ones
SPARE_BYTES = 4 << 20  # the header, and values of a size known only at the save


class ArenaUnavailable(Exception):
    """The budget allows no copy at all: the file is written from the live tensors."""


class Arenas:
    """The arenas of one rank.

    Attributes:
        newest: Folder of the snapshot not to be overwritten while there is a choice.
        device_copier: Copies to the arenas from a GPU; all of them are registered there.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        local_ranks: Sequence[int],
        budget: Budget | None = None,
        *,
        newest: str | None = None,
    ) -> None:
        self.newest = newest
        self.device_copier = DeviceCopier(say=logger.warning)
        self.device_copier.look_for_recorded()
        self._memory_dir = SharedMemoryDir.of(run)
        self._rank = rank
        self._ranks = tuple(local_ranks)
        self._budget = budget
        self._open: list[Arena] = []
        self._superseded: set[Path] = set()  # arenas of another kind, used earlier in this attempt
        self._filled: Arena | None = None  # by the save in flight
        self._private = memoryview(b"")
        self._logged_kind = ""
        self._preparing: threading.Thread | None = None
        self._readable: dict[str, Arena] = {}  # key of a committed file -> its arena
        self._read_lock = threading.Lock()

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @property
    def are_ready(self) -> bool:
        """True if there is memory touched before: a copy to it costs little."""
        self._wait()
        return bool(self._open) or len(self._private) > 0

    def unlock_memory(self) -> None:
        """Unlock memory for GPUs until the next save: a process dump would have to know of it."""
        self._wait()
        self.device_copier.close()

    @property
    def descriptor(self) -> int | None:
        """Descriptor of the file that holds the save in flight; None if it is no file."""
        return self._filled.descriptor if self._filled is not None else None

    @property
    def copy_threads(self) -> int:
        """Number of threads that may copy beside training."""
        return copy_threads(len(self._ranks), beside_training=True)

    @property
    def are_double(self) -> bool:
        """True if the newest file is not overwritten before the next is complete."""
        return len(self._open) >= MAX_ARENAS

    @property
    def outlive_process(self) -> bool:
        """True if the arenas also outlive this process."""
        return self.are_double and all(arena.outlives for arena in self._open)

    def release_private(self) -> memoryview:
        """Release memory outside file systems before a dump, which would contain it.

        Returns memory without contents of value.
        """
        self.unlock_memory()
        self._close_arenas([arena for arena in self._open if not arena.outlives])
        return self._private

    def prepare(self, num_bytes: int) -> None:
        """Touch memory for a file of about this size, on a thread, before it is needed.

        Does nothing once a file was laid out: that file may be in flight, and of another size.
        """
        if self._filled is not None:
            return
        size = num_bytes + SPARE_BYTES
        self._preparing = threading.Thread(
            target=self._touch, args=(size,), name="trainckpt-arena", daemon=True
        )
        self._preparing.start()

    def _touch(self, num_bytes: int) -> None:
        kind, number = choose(self._memory_space(num_bytes), num_bytes)
        if kind in (PRIVATE, STREAMED):
            return
        self._open_arenas(kind, number)
        for arena in self._open:
            if not arena.holds():
                with contextlib.suppress(OSError):
                    arena.reserve(num_bytes, spare=True)
                    self.device_copier.register(arena.reserved)

    def memory(self, num_bytes: int) -> memoryview:
        """Return memory for the next shard file; the buffer returned before the last is invalid.

        Raises:
            ArenaUnavailable: not within the budget.
        """
        self._wait()
        self._remove_superseded()
        kind, number = choose(self._memory_space(num_bytes), num_bytes)
        self._filled = None
        if kind in (SHARED, OWN):
            arena = self._reserve_arena(kind, num_bytes, number)
            if arena is not None:
                self._replace_private(memoryview(b""))
                self.device_copier.register(arena.reserved)
                return arena.memory
            kind = PRIVATE
        if kind == STREAMED:
            self._log_kind(
                STREAMED,
                f"no arena for its saves: {mb(num_bytes)} exceed memory_budget or the free memory, "
                "so training waits while each file is written",
            )
            raise ArenaUnavailable
        self._close()
        if len(self._private) < num_bytes:
            self._replace_private(private_memory(num_bytes + SPARE_BYTES))
        self.device_copier.register(self._private)
        self._log_kind(
            PRIVATE,
            f"{mb(num_bytes)} of private memory: {self._why_not_shared()}, so no copy "
            "outlives the process",
        )
        return self._private[:num_bytes]

    def _replace_private(self, memory: memoryview) -> None:
        self.device_copier.keep(self._private, 0)
        self._private = memory

    def on_commit(self, event: CommitEvent) -> None:
        """Publish the committed shard, unless it was written from the live tensors."""
        if isinstance(event.shard, Shard):
            self.publish(event.manifest.name, shard_file_name(self._rank))

    def publish(self, name: SnapshotName, file: str) -> None:
        """Publish the bytes of the committed save in flight: they are found in memory too."""
        if self._filled is None or self._memory_dir is None:
            return
        folder = name.folder
        try:
            self._filled.publish(folder, file)
            self.newest = folder
            with self._read_lock:
                self._readable[f"{folder}/{file}"] = self._filled
        except OSError as error:  # another process may have removed its folder
            logger.warning("could not keep the snapshot in shared memory: %s", error)
        self._remove_older(name)

    def prefer(self, newest: str | None) -> None:
        """Keep this snapshot rather than the one published last, which is of no use."""
        self.newest = newest

    def copy_from(self, key: str, first_byte: int, into: memoryview) -> bool:
        """Copy bytes of a committed file from its arena; return False if none holds it any more.

        Any thread. A save that needs the arena waits for this one copy at most.
        """
        with self._read_lock:
            arena = self._readable.get(key)
            end = first_byte + len(into)
            if arena is None or end > len(arena.memory):
                return False
            copy_bytes(into, arena.memory[first_byte:end])
            return True

    def _unindex(self, arenas: Sequence[Arena]) -> None:
        """Drop these arenas from the readable ones, before they are overwritten or closed."""
        with self._read_lock:
            remaining = {key: arena for key, arena in self._readable.items() if arena not in arenas}
            self._readable = remaining

    def _remove_older(self, name: SnapshotName) -> None:
        """Remove the arenas of earlier attempts: this one has committed."""
        assert self._memory_dir is not None
        old = [folder for folder in self._memory_dir.folders() if _age([folder])[0] < name.attempt]
        with contextlib.suppress(OSError):
            if self._rank == self._ranks[0]:
                self._memory_dir.forget(old)
            self._memory_dir.keep_arenas(self._ranks, self._rank, [a.path for a in self._open])

    def close(self, *, keep: bool) -> None:
        """End the attempt; `keep` shared memory for the next."""
        self._wait()
        if not keep:
            self._unindex(self._open)
            for arena in self._open:
                with contextlib.suppress(OSError):
                    arena.remove()
            self._open = []
        self._close()
        self.device_copier.close()
        if not keep and self._memory_dir is not None:
            if self._rank == self._ranks[0]:
                self._memory_dir.remove()  # and what earlier attempts left, which no rank opened
            else:
                self._memory_dir.give_back(self._rank)  # of a kind used before another was chosen

    def _why_not_shared(self) -> str:
        if self._memory_dir is None:
            return why_unavailable()
        return "shared memory has no room for them"

    def _reserve_arena(self, kind: str, num_bytes: int, number: int) -> Arena | None:
        """Return a reserved arena that may be overwritten; None if the system refuses it."""
        while (arena := self._reusable_arena(kind, number)) is not None:
            self._unindex([arena])
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
            assert self._memory_dir is not None
            memory = f"shared memory in {self._memory_dir.root}"
            if not arena.outlives:
                memory = (
                    "private memory, so no copy outlives the process: "
                    f"{self._memory_dir.root.parent.parent} has no room for them (docker run "
                    "--shm-size=8g, or --ipc=host, gives it more)"
                )
            self._log_kind(
                f"{kind} {number}",
                f"{number} x {mb(num_bytes)} of {memory}",
                is_best=number >= MAX_ARENAS and arena.outlives,
            )
            return arena
        return None

    def _reusable_arena(self, kind: str, number: int) -> Arena | None:
        """Return an arena that may be overwritten, among at most `number`."""
        self._open_arenas(kind, number)
        free = [arena for arena in self._open if self.newest not in arena.holds()]
        return min(free or self._open, key=lambda arena: _age(arena.holds()), default=None)

    def _open_arenas(self, kind: str, number: int) -> None:
        """Open this rank's arenas, those of earlier attempts first; create missing ones."""
        other_kind = [arena for arena in self._open if arena.outlives != (kind == SHARED)]
        self._superseded |= {arena.path for arena in other_kind if arena.outlives}
        self._close_arenas(other_kind)
        open_paths = {arena.path for arena in self._open}
        for n in _NUMBERS:
            if len(self._open) >= number or self._memory_dir is None:
                break
            path = self._memory_dir.path_of(self._rank, n)
            with contextlib.suppress(OSError):  # such as `ArenaInUse`
                if path not in open_paths:
                    is_own = kind == OWN
                    self._open.append(
                        Own(self._memory_dir) if is_own else self._memory_dir.open_arena(path)
                    )
                    self._open[-1].keeps = self.device_copier.keep
        too_many = max(len(self._open) - number, 0)
        for arena in sorted(self._open, key=lambda a: _age(a.holds()))[:too_many]:
            self._open.remove(arena)
            self._unindex([arena])
            arena.remove()

    def _remove_superseded(self) -> None:
        """Remove memory of another kind, once this kind holds the newest snapshot.

        That memory counts in no budget, and would be overwritten next.
        """
        if not (
            self._memory_dir
            and self._superseded
            and any(self.newest in a.holds() for a in self._open)
        ):
            return
        for path in self._superseded - {arena.path for arena in self._open}:
            with contextlib.suppress(OSError):
                self._memory_dir.open_arena(path).remove()
                self._superseded.discard(path)

    def _memory_space(self, num_bytes: int) -> MemorySpace:
        in_files = sum(arena.capacity_bytes for arena in self._open if arena.outlives)
        in_memfds = sum(arena.capacity_bytes for arena in self._open if not arena.outlives)
        shared, free = self._memory_dir is not None, 0
        if self._memory_dir is not None:
            try:
                in_files = in_files if self._open else self._memory_dir.left_by(self._rank)
                free = self._memory_dir.free_bytes // len(self._ranks)
            except OSError:
                shared = False
        budget = self._allowed_bytes(num_bytes, in_files + in_memfds)
        beyond = self._memory_dir is not None and has_memfd()
        return MemorySpace(budget, shared, free + in_files, beyond)

    def _allowed_bytes(self, num_bytes: int, shared_bytes: int) -> int | None:
        """Return the bytes this rank may use in all, including those it has already."""
        budget = self._own_budget()
        taken = max(shared_bytes, len(self._private))
        if taken >= MAX_ARENAS * num_bytes or (left := self._available_share()) is None:
            return budget
        return taken + left if budget is None else min(budget, taken + left)

    def has_room(self, num_bytes: int, used_bytes: int | None) -> bool:
        """Return True if so many bytes may be used for something else.

        Args:
            num_bytes: Bytes.
            used_bytes: Bytes used for such things before; all are to be within `memory_budget`.
                None: the budget does not count.
        """
        left, budget = self._available_share(), self._own_budget()
        if left is not None and num_bytes > left:
            return False
        own = sum(arena.capacity_bytes for arena in self._open)
        return budget is None or used_bytes is None or own + used_bytes + num_bytes <= budget

    def _own_budget(self) -> int | None:
        """Return this rank's share of `memory_budget`; None: no limit is known."""
        if self._budget is None:
            return None
        budget = budget_bytes(self._budget.share, self._budget.num_bytes)
        return None if budget is None else budget // len(self._ranks)

    def _available_share(self) -> int | None:
        """Return this rank's share of memory left by host and cgroups; None if unknown."""
        if (left := available_bytes()) is None:
            return None
        return max(left // len(self._ranks) - host_resources.transient_bytes(), 0)

    def _close(self) -> None:
        self._close_arenas(list(self._open))
        self._filled = None

    def _close_arenas(self, arenas: Sequence[Arena]) -> None:
        """Close arenas; other processes may use those that outlive this one."""
        self._unindex(arenas)
        for arena in arenas:
            with contextlib.suppress(OSError):
                arena.close()
        self._open = [arena for arena in self._open if arena not in arenas]

    def _log_kind(self, kind: str, what: str, *, is_best: bool = False) -> None:
        # On any rank: all others' steps wait for it.
        if kind != self._logged_kind and kind == STREAMED:
            logger.warning("rank %d has %s", self._rank, what)
        elif kind != self._logged_kind and self._rank == 0:
            level = logging.DEBUG if is_best else logging.INFO
            logger.log(level, "each rank's saves are laid out in %s", what)
        self._logged_kind = kind


def _age(folders: Sequence[str]) -> tuple[int, int]:
    """Attempt and sequence of the newest snapshot that an arena holds; lowest if none."""
    names = [SnapshotName.parse(folder.rpartition("/")[2]) for folder in folders]
    return max(((n.attempt, n.sequence) for n in names if n), default=(0, 0))
