"""Copy shard files from a tier into this host's memory, for all its ranks to read.

Callers:
    the supervisor                 while restarted ranks still import and connect
    the ranks of one host          each fetches its share of the files all of them need

Readers verify the data, and read bad files from the tier itself. So a failed fetch costs nothing.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.snapshot.restore import READ_BYTES
from trainckpt.storage.direct_io import buffers
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import ArenaInUse
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.storage.arena import Arena
    from trainckpt.storage.base import Readable
    from trainckpt.storage.shared_memory import SharedMemoryDir

    Read = Callable[[int, memoryview], None]  # fills memory from a byte of the file on

PART_BYTES = 4 << 20  # of one read
NUM_PARTS = 8  # in memory at once
# While others need the disk: their reads queue behind what is in flight here.
GENTLE_BYTES, GENTLE_PARTS = 2 << 20, 2
SEALED_BYTES = 64 << 20  # one read of an encrypted file: chunks at both its ends are read twice
NUMBERS = range(2)  # a rank's arenas
MOSTLY = 0.5  # share of replicated bytes above which fetching together pays


def fetch(
    tier: Readable,
    memory_dir: SharedMemoryDir,
    manifest: Manifest,
    numbers: Iterable[int],
    *,
    awaited: threading.Event | None = None,
) -> list[int]:
    """Copy the shard files of these ranks into memory, unless present; return the ranks copied.

    Args:
        tier: The source.
        memory_dir: The destination.
        manifest: The snapshot's.
        numbers: The ranks.
        awaited: Until it is set, other readers need the disk, so few reads are in flight.
            None: no other reader does.
    """
    came, folder = [], manifest.name.folder
    for number in numbers:
        file = manifest.files[number]
        if is_there(memory_dir, manifest, number):
            continue
        arena = _arena(memory_dir, number)
        if arena is None:
            continue
        with contextlib.closing(arena):
            try:
                _fill(tier, arena, folder, file, awaited)
            except (OSError, TrainckptError):
                with contextlib.suppress(OSError):
                    arena.retract()
            else:
                came.append(number)
    return came


def is_shared(manifest: Manifest) -> bool:
    """Return True if most bytes of a snapshot are replicated, so several ranks read them."""
    shared = total = 0
    for entry in manifest.tensors.values():
        total += entry.num_bytes
        if entry.layout is not None and entry.layout.num_replicas > 1:
            shared += entry.num_bytes
    return shared > MOSTLY * total


def held_bytes(manifest: Manifest) -> int:
    """Return the bytes of a snapshot's tensors over all ranks, every replica counted."""
    each = manifest.tensors.values()
    world = len(manifest.files)
    return sum(e.num_bytes * (e.layout.num_replicas if e.layout else world) for e in each)


def is_there(memory_dir: SharedMemoryDir, manifest: Manifest, number: int) -> bool:
    """Return True if this host's memory holds the file, valid or not."""
    file = manifest.files[number]
    held = memory_dir.held(manifest.name.folder, file.name, file.content.num_bytes)
    if held is not None:
        held.close()
    return held is not None


def room_for(memory_dir: SharedMemoryDir, manifest: Manifest, number: int) -> Arena | None:
    """Return an arena with memory reserved for the file, to fill and publish; None: no room."""
    arena = _arena(memory_dir, number)
    if arena is not None:
        try:
            arena.reserve(manifest.files[number].content.num_bytes)
        except OSError:
            arena.close()
            return None
    return arena


def _arena(memory_dir: SharedMemoryDir, rank: int) -> Arena | None:
    """Return a free arena of this rank, preferably an empty one; None if all are in use."""
    found: list[Arena] = []
    for number in NUMBERS:
        with contextlib.suppress(ArenaInUse, OSError):
            found.append(memory_dir.arena(rank, number))
    found.sort(key=lambda arena: len(arena.holds()))
    for arena in found[1:]:
        arena.close()
    return found[0] if found else None


def _fill(
    tier: Readable,
    arena: Arena,
    folder: str,
    file: FileEntry,
    awaited: threading.Event | None,
) -> None:
    """Copy one file to an arena through a few buffers.

    Several reads are in flight. Large buffers are in huge pages: a disk reads three times as fast
    into them as into tmpfs pages. Writing to tmpfs also saves clearing and mapping its pages.
    """
    num_bytes, key = file.content.num_bytes, f"{folder}/{file.name}"
    size, num = (PART_BYTES if awaited is None else GENTLE_BYTES), NUM_PARTS
    size, num = (SEALED_BYTES, 1) if file.sealed else (size, num)
    blocks = Blocks(num_bytes, size, num, awaited)
    writing = threading.Lock()  # the kernel allows one write at a time: others would spin

    def bring(read: Read, first_byte: int) -> None:
        # on any thread
        block = blocks.take()
        data = block[: min(size, num_bytes - first_byte)]
        try:
            read(first_byte, data)
            with writing:
                arena.write(first_byte, data)
        finally:
            blocks.give(block)

    arena.begin(num_bytes)
    try:
        with _opened(tier, key) as read, Workers(blocks.num, "trainckpt-fetch") as workers:
            for first_byte in range(0, num_bytes, size):
                workers.submit(partial(bring, read, first_byte))
            workers.settle()
    except BaseException:
        arena.empty()  # a partial file is useless, and may have holes
        raise
    arena.publish(folder, file.name)


@contextlib.contextmanager
def _opened(tier: Readable, key: str) -> Iterator[Read]:
    """Yield a function that fills memory from a file offset, callable on any thread.

    A local file is opened once: opening it for each MB costs as much CPU as reading that MB.
    """
    if isinstance(tier, LocalTier):
        with tier.opened(key) as file:
            yield file.fill
        return

    def read(first_byte: int, into: memoryview) -> None:
        steps = range(0, len(into), READ_BYTES)
        parts = [(first_byte + at, into[at : at + READ_BYTES]) for at in steps]
        tier.read_parts(key, parts, lambda _: None)

    yield read


class Blocks:
    """Buffers for parts in flight. Any thread.

    Attributes:
        size: Bytes of each.
        num: Buffers in all; `GENTLE_PARTS` are handed out until `awaited` is set.
    """

    def __init__(
        self, num_bytes: int, size: int, most: int, awaited: threading.Event | None
    ) -> None:
        self.size, self.num = size, max(1, min(most, -(-num_bytes // size)))
        self._awaited = awaited
        self._spare = buffers(self.num, size)
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._out = 0
        self._lock = threading.Lock()
        self._let_out()

    def take(self, timeout_s: float | None = None) -> memoryview:
        """Return a free buffer; wait for one, or raise `queue.Empty` at the timeout."""
        return self._free.get(timeout=timeout_s)

    def give(self, block: memoryview) -> None:
        """Return a buffer to the pool once its part has arrived."""
        with self._lock:
            self._spare.append(block)
            self._out -= 1
            self._let_out()

    def _let_out(self) -> None:
        is_alone = self._awaited is None or self._awaited.is_set()
        most = self.num if is_alone else GENTLE_PARTS
        while self._spare and self._out < most:
            self._free.put(self._spare.pop())
            self._out += 1
