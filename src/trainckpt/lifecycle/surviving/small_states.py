"""Small states: what is each rank's own, kept by its partner at each step.

    one thread, each moment in turn
    1  spells the small shard file's head: digests, so that whoever uses it knows that it is whole
    2  sends it to this rank's partner, and receives those of whom it is the partner
    3  counts itself in; once all ranks have come so far, the moment is safe

Groups of their own, two ranks each, so training takes no part. A rank that dies ends its partners'
exchange, and that is a sign that it died.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement
from trainckpt.ranks import talking
from trainckpt.ranks.channel import DAY_S
from trainckpt.ranks.exchange import Exchange
from trainckpt.state.stage import private_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.ranks.channel import Channel
    from trainckpt.state.moment import Moment

LENGTH_BYTES = 8
MAX_BYTES = 1 << 34
END_WITHIN_S = 5.0  # of the thread; longer where a partner is gone, and then it stays where it is


class SmallStates:
    """Of one rank.

    Attributes:
        owners: Whose small states this rank keeps.
        gone: Why no more come, or "".
    """

    def __init__(self, channel: Channel, partners: Sequence[int]) -> None:
        """`partners`: of every rank, who keeps what is its own."""
        self._rank, self._size = channel.world.rank, channel.world.size
        self._partners = tuple(partners)
        self.owners = [owner for owner, p in enumerate(partners) if p == self._rank]
        self.gone = ""
        self._channel = channel.scoped("small").connection()
        self._groups: dict[int, Exchange] = {}
        self._queue: queue.SimpleQueue[Moment | None] = queue.SimpleQueue()
        self._number = 0
        self._closed = False
        self._thread = talking.thread(self._work, "trainckpt-small")
        self._thread.start()

    def bring(self, moment: Moment) -> None:
        """Let it be kept. The training thread, on all ranks the same ones in the same order."""
        self._queue.put(moment)

    def close(self) -> None:
        """The attempt is over: others leaving is no sign any more.

        The thread is waited for: one that takes a group apart while the interpreter ends would
        abort the process, whatever its exit code was to be.
        """
        self._closed = True
        self._queue.put(None)
        self._thread.join(END_WITHIN_S)

    def _work(self) -> None:
        # background thread: no collectives of training's groups
        while (moment := self._queue.get()) is not None:
            self._number += 1
            try:
                self._exchange(moment)
                self._count(moment)
            except (NoAgreement, RuntimeError) as error:
                if not self._closed:
                    self.gone = getattr(error, "message", str(error)) or repr(error)
                break
        self._groups = {}

    def _exchange(self, moment: Moment) -> None:
        _ = moment.small.head
        self._join()
        mine = self._groups[self._rank]
        lengths = {owner: bytearray(LENGTH_BYTES) for owner in self.owners}
        length = bytearray(len(moment.small.memory).to_bytes(LENGTH_BYTES, "little"))
        begun = [(mine, mine.begin([], [(1, 0, memoryview(length))]))]
        for owner, into in lengths.items():
            group = self._groups[owner]
            begun.append((group, group.begin([(0, 0, memoryview(into))], [])))
        _settle(begun)
        begun = [(mine, mine.begin([], [(1, 1, moment.small.memory)]))]
        kept: dict[int, memoryview] = {}
        for owner, told in lengths.items():
            num_bytes = int.from_bytes(told, "little")
            if num_bytes > MAX_BYTES:
                raise NoAgreement(f"rank {owner} says that its state has {num_bytes} bytes")
            kept[owner], group = private_memory(num_bytes), self._groups[owner]
            begun.append((group, group.begin([(0, 1, kept[owner])], [])))
        _settle(begun)
        moment.kept = kept

    def _count(self, moment: Moment) -> None:
        key = f"{self._number}/all"
        if self._channel.count(f"{self._number}/here") == self._size:
            self._channel.put(key, True)
            old = self._number - 2  # nobody waits for that: all have counted a later one
            self._channel.forget([f"{old}/here", f"{old}/all"] if old > 0 else [])
        else:
            self._channel.get(key, DAY_S)
        moment.safe.set()

    def _join(self) -> None:
        """Find the partners, in one order on all ranks."""
        if self._groups:
            return
        for owner, partner in enumerate(self._partners):
            if self._rank in (owner, partner):
                members = (owner, partner)
                self._groups[owner] = Exchange(self._channel, f"group/{owner}", members, DAY_S)


def _settle(begun: list[tuple[Exchange, list[tuple[object, object]]]]) -> None:
    for group, works in begun:
        group.settle(works)
