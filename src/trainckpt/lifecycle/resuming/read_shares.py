"""Read shares: the ranks of one host read a snapshot between them, and copy from each other.

every rank   tells where some bytes lie in its memory; one, of memory to have in common
all          those that read each other's as they were told are one circle; where some could not,
             they let others read (`other_memory.open_to_siblings`), and all try once more
every rank   reads its share (`snapshot.shares`), and brings where it lies
members      copy the rest
all          bring the result, as after any read (`candidate`): memory may change again
"""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot.board import Board
from trainckpt.snapshot.fetch import is_shared
from trainckpt.snapshot.shares import Share
from trainckpt.tiers import other_memory
from trainckpt.tiers.common_memory import CommonMemory
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.read_file import NUM_READERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.channel import Channel
    from trainckpt.snapshot.restore import Reader
    from trainckpt.tiers.base import Tier

FROM_BYTES = 8 << 20  # a snapshot that is smaller is read sooner than it is shared
PROBE_BYTES = 32
LEAST_READERS = 2  # of a rank: one waits for the disk while another verifies


class Circle(NamedTuple):
    """Ranks of one host that can read each other's memory, and this one's number among them.

    Attributes:
        common: Memory for all of them; None: not all can open it.
        board: Where this rank says what it has read.
        boards: Where the others do.
    """

    ranks: Sequence[int]
    number: int
    common: CommonMemory | None = None
    board: Board | None = None
    boards: Sequence[other_memory.Place] = ()

    def share(self, manifest: Manifest) -> Share | None:
        """What this rank reads of a snapshot; None: all that it needs."""
        total = sum(file.content.num_bytes for file in manifest.files)
        if total < FROM_BYTES or not (is_shared(manifest) or len(manifest.files) == 1):
            return None
        each = self.number, len(self.ranks)
        return Share(*each, manifest, self.common, self.board, self.boards)


def readers_each(num_ranks: int) -> int:
    """Threads with which each of so many ranks of a host reads: as many together as one alone."""
    return max(LEAST_READERS, NUM_READERS // num_ranks)


@contextmanager
def fewer_readers(tiers: Sequence[Tier], members: Circle | None) -> Iterator[None]:
    """Inside, each member of a circle reads from a directory with its part of the threads."""
    directories = [tier for tier in tiers if isinstance(tier, LocalTier)]
    if members is not None:
        for tier in directories:
            tier.num_readers = readers_each(len(members.ranks))
    try:
        yield
    finally:
        for tier in directories:
            tier.num_readers = NUM_READERS


@contextmanager
def circle(channel: Channel, hosts: Sequence[str]) -> Iterator[Circle | None]:
    """This rank's circle, open until the context ends; None: it reads alone.

    Every rank calls it, and all members of a circle come to the same. A process says whom it lets
    read only where they cannot without: what was said before, for another purpose, is lost then.
    """
    if max(Counter(hosts).values(), default=1) < 2:
        yield None
        return
    me = channel.world.rank
    here = [rank for rank, host in enumerate(hosts) if host == hosts[me]]
    probe, board = bytearray(secrets.token_bytes(PROBE_BYTES)), Board()
    with ExitStack() as stack:
        common = _common(CommonMemory.make, stack) if me == here[0] else None
        mine = {"place": other_memory.place_of(memoryview(probe)), "holds": probe.hex(),
                "common": str(common.target) if common is not None else "",
                "board": board.place}  # fmt: skip
        told = channel.gather("probes", mine, RANKS_TIMEOUT_S)
        others = [told[rank] for rank in here if rank != me]
        if me != here[0]:
            common = _common(lambda: CommonMemory.opened(told[here[0]]["common"]), stack)
        both = [all(map(_reads, others)), common is not None]
        answers = channel.gather("probed", both, RANKS_TIMEOUT_S)
        can = [reads for reads, _ in answers]
        if not all(answers[rank][1] for rank in here):
            common = None
        if not all(can):
            if not all(can[rank] for rank in here):
                stack.enter_context(other_memory.open_to_siblings())
            channel.gather("opened", True, RANKS_TIMEOUT_S)
            can = channel.gather("probed again", all(map(_reads, others)), RANKS_TIMEOUT_S)
        is_one = len(here) > 1 and all(can[rank] for rank in here)
        boards = [other_memory.Place(*other["board"]) for other in others]
        yield Circle(here, here.index(me), common, board, boards) if is_one else None


def take(
    reader: Reader, members: Circle | None, results: Sequence[Mapping[str, Any]], name: SnapshotName
) -> None:
    """Take what this rank left to the others.

    Args:
        reader: Has read this rank's share.
        members: Its circle.
        results: What each rank brought when it had read its own.
        name: Of the snapshot.

    Raises:
        UnusableSnapshot, TierUnavailable: of what was not there, and was read after all.
    """
    ranks = members.ranks if members is not None else ()
    told = [results[rank].get("share") for rank in ranks]
    dealt = {results[rank]["dealt"] for rank in ranks}
    agreed = len(dealt) == 1 and dealt != {""}
    missed = reader.take([other_memory.Place(*place) for place in told if place], agreed=agreed)
    if missed:
        logger.info("%.1f MB of %s were not in the memory of this host's other ranks, and were "
                    "read by each", missed / 1e6, name)  # fmt: skip


def _common(get: Callable[[], CommonMemory], stack: ExitStack) -> CommonMemory | None:
    """Closed with `stack`."""
    try:
        found = get()
    except OSError:
        return None
    stack.callback(found.close)
    return found


def _reads(told: Mapping[str, Any]) -> bool:
    found = bytearray(PROBE_BYTES)
    try:
        other_memory.read(other_memory.Place(*told["place"]), memoryview(found))
    except OSError:
        return False
    return bool(found.hex() == told["holds"])
