"""Fetch: shard files from a tier into this host's memory, where all its ranks read them.

    whoever starts a run again     while the ranks still import and find each other
    the ranks of one host          each its share of the files that all of them need

Whoever reads verifies, and reads from the tier itself what is not good. So what a fetch brings is
only ever nearer, and one that fails costs nothing. It can verify what passes: who reads many times
what one process has brought need not do so then (`vouched`).
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.snapshot.blocks import READ_BYTES
from trainckpt.snapshot.parts import Part, cut, cut_at_blocks
from trainckpt.snapshot.restore import header_of
from trainckpt.tiers.direct import buffers
from trainckpt.tiers.held import stamp_of
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.memory import MemoryTaken
from trainckpt.tiers.queue_depth import QueueDepth
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.format.files import FileEntry
    from trainckpt.format.manifest import Manifest
    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.base import Readable
    from trainckpt.tiers.held import Stamp
    from trainckpt.tiers.memory import MemoryPlace

    Read = Callable[[int, memoryview], None]  # fills memory from a byte of the file on

PART_BYTES = 4 << 20  # read at once
NUM_PARTS = 8  # in memory at once
GENTLE_BYTES, GENTLE_PARTS = 2 << 20, 8  # the same beside others, who wait behind what is read
WINDOW_BYTES = 32 << 20  # over which it is measured how fast they come
SEALED_BYTES = 64 << 20  # at once of what is encrypted: chunks at both ends of it are read twice
NUMBERS = range(2)  # arenas of a rank among which one is taken
MOSTLY = 0.5  # of a snapshot's bytes that several ranks need, for which fetching together pays


@dataclass(frozen=True)
class Beside:
    """Others need the disk too, and come first.

    Attributes:
        awaited: Set once they wait for what is read here.
        depth: Reads on their way until then; what one file has shown holds for the next.
    """

    awaited: threading.Event
    depth: QueueDepth = field(default_factory=lambda: QueueDepth(GENTLE_PARTS))

    @property
    def most(self) -> float:
        """Reads that may be on their way now."""
        return math.inf if self.awaited.is_set() else self.depth.now


def fetch(
    tier: Readable,
    place: MemoryPlace,
    manifest: Manifest,
    numbers: Iterable[int],
    *,
    awaited: threading.Event | None = None,
    on_verified: Callable[[int, Stamp], None] | None = None,
) -> list[int]:
    """Bring the shard files of these ranks into memory, unless they are there; which came.

    Args:
        tier: From where.
        place: To where.
        manifest: Of the snapshot.
        numbers: Of the ranks.
        awaited: Until it is set others need the disk that it is read from: few reads are on
            their way. None: nobody else does.
        on_verified: Is told of each file that was verified on its way, with its stamp. None: no
            file is.
    """
    came, folder = [], manifest.name.folder
    beside, verify = Beside(awaited) if awaited is not None else None, on_verified is not None
    for number in numbers:
        file = manifest.files[number]
        if is_there(place, manifest, number):
            continue
        arena = _arena(place, number)
        if arena is None:
            continue
        with contextlib.closing(arena):
            try:
                stamp = _fill(tier, arena, folder, file, beside, verify=verify)
            except (OSError, TrainckptError):
                with contextlib.suppress(OSError):
                    arena.retract()
            else:
                came.append(number)
                if on_verified is not None and stamp is not None:
                    on_verified(number, stamp)
    return came


def is_shared(manifest: Manifest) -> bool:
    """Whether most bytes of a snapshot lie alike on several ranks, which all read them."""
    shared = total = 0
    for entry in manifest.tensors.values():
        total += entry.num_bytes
        if entry.layout is not None and entry.layout.num_replicas > 1:
            shared += entry.num_bytes
    return shared > MOSTLY * total


def held_bytes(manifest: Manifest) -> int:
    """What all ranks together hold of a snapshot's tensors, each its own copy of what is alike."""
    each = manifest.tensors.values()
    world = len(manifest.files)
    return sum(e.num_bytes * (e.layout.num_replicas if e.layout else world) for e in each)


def is_there(place: MemoryPlace, manifest: Manifest, number: int) -> bool:
    """Whether this host's memory holds a file of the snapshot, good or not."""
    file = manifest.files[number]
    held = place.held(manifest.name.folder, file.name, file.content.num_bytes)
    if held is not None:
        held.close()
    return held is not None


def room_for(place: MemoryPlace, manifest: Manifest, number: int) -> Arena | None:
    """An arena with as much memory as a file needs, to be filled and published; None: no room."""
    arena = _arena(place, number)
    if arena is not None:
        try:
            arena.reserve(manifest.files[number].content.num_bytes)
        except OSError:
            arena.close()
            return None
    return arena


def _arena(place: MemoryPlace, rank: int) -> Arena | None:
    """An arena of this rank that nobody has, the one that holds nothing if there is one."""
    found: list[Arena] = []
    for number in NUMBERS:
        with contextlib.suppress(MemoryTaken, OSError):
            found.append(place.arena(rank, number))
    found.sort(key=lambda arena: len(arena.holds()))
    for arena in found[1:]:
        arena.close()
    return found[0] if found else None


def _fill(
    tier: Readable,
    arena: Arena,
    folder: str,
    file: FileEntry,
    beside: Beside | None,
    *,
    verify: bool,
) -> Stamp | None:
    """Read it into a few blocks, of huge pages if large, several at once; write it from there.

    A disk is three times as fast where memory comes in large pieces, which tmpfs' own does not, and
    what is written to tmpfs is neither cleared nor mapped before. Returns the stamp of what was
    verified meanwhile, all of it.
    """
    num_bytes, key = file.content.num_bytes, f"{folder}/{file.name}"
    size, num = (PART_BYTES, NUM_PARTS) if beside is None else (GENTLE_BYTES, GENTLE_PARTS)
    size, num = (SEALED_BYTES, 1) if file.sealed else (size, num)
    blocks = Blocks(num_bytes, size, num, beside)
    arena.begin(num_bytes)
    try:
        with _opened(tier, key) as read, Workers(blocks.num, "trainckpt-fetch") as workers:
            filling = _Filling(read, arena, blocks)
            known = _known_parts(read, key, file, size) if verify else None
            for part in known or cut(num_bytes, size):
                workers.submit(partial(filling.bring, part))
            workers.settle()
    except BaseException:
        arena.empty()  # by half it is of no use, and may have holes
        raise
    arena.publish(folder, file.name)
    return stamp_of(arena.descriptor) if known is not None and filling.is_good else None


class _Filling:
    """One file on its way into an arena. Any thread.

    Attributes:
        is_good: Whether no part was other than its digests say.
    """

    def __init__(self, read: Read, arena: Arena, blocks: Blocks) -> None:
        self._read, self._arena, self._blocks = read, arena, blocks
        self._writing = threading.Lock()  # the system lets one write at a time: others would spin
        self.is_good = True

    def bring(self, part: Part) -> None:
        """Read it, and write it; errors as both."""
        block = self._blocks.take()
        data = block[: part.num_bytes]
        try:
            self._read(part.first_byte, data)
            if not part.is_good(data):
                self.is_good = False
            with self._writing:
                self._arena.write(part.first_byte, data)
        finally:
            self._blocks.give(block)


def _known_parts(read: Read, key: str, file: FileEntry, size: int) -> list[Part] | None:
    """The file cut so that it can be verified; None: it cannot, or its head is not good."""
    try:
        return cut_at_blocks(header_of(read, key, file), key, size)
    except UnusableSnapshot:
        return None


@contextlib.contextmanager
def _opened(tier: Readable, key: str) -> Iterator[Read]:
    """What fills memory from a place in a file on; any thread. Where a tier can, it opens it once.

    To open it for each MB takes as much of a core as to read that.
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
    """Memory for what is on its way: whoever has a block reads into it. Any thread.

    Attributes:
        size: Bytes of each.
        num: Blocks there are; fewer are out while others need the disk.
    """

    def __init__(self, num_bytes: int, size: int, most: int, beside: Beside | None) -> None:
        self.size, self.num = size, max(1, min(most, -(-num_bytes // size)))
        self._beside = beside
        self._spare = buffers(self.num, size)
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._out = self._came = 0
        self._since_s = time.perf_counter()
        self._lock = threading.Lock()
        self._let_out()

    def take(self, timeout_s: float | None = None) -> memoryview:
        """A block; waits until there is one, or raises `queue.Empty`."""
        return self._free.get(timeout=timeout_s)

    def give(self, block: memoryview) -> None:
        """It is free again: what was in it has come."""
        with self._lock:
            self._spare.append(block)
            self._out -= 1
            if self._beside is not None:
                self._measure(self._beside.depth)
            self._let_out()

    def _measure(self, depth: QueueDepth) -> None:
        self._came += self.size
        if self._came >= WINDOW_BYTES:
            now_s = time.perf_counter()
            depth.measured(self._came / max(now_s - self._since_s, 1e-9))
            self._came, self._since_s = 0, now_s

    def _let_out(self) -> None:
        most = math.inf if self._beside is None else self._beside.most
        while self._spare and self._out < most:
            self._free.put(self._spare.pop())
            self._out += 1
