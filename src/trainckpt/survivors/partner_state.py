"""Partner state: each rank's own state, held by its partner at each step.

    one thread, each step state in turn
    1  computes the small shard file's head: digests, so that its reader can verify it
    2  sends it to this rank's partner, and receives those of the ranks it is the partner of
    3  counts itself in; once all ranks have come so far, the step state is safe

Groups of their own, two ranks each, so training takes no part. A rank that dies ends its partners'
exchange, and that is a sign that it died.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement
from trainckpt.ranks import threads
from trainckpt.ranks.exchange import Exchange
from trainckpt.ranks.store import DAY_S
from trainckpt.state.staging import private_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.ranks.store import RankStore
    from trainckpt.state.step_state import StepState

LENGTH_BYTES = 8
MAX_BYTES = 1 << 34
END_WITHIN_S = 5.0  # of the thread; longer where a partner is gone, and then it stays where it is


class PartnerStateExchange:
    """Exchange of own states between this rank and its partners.

    Attributes:
        owners: Ranks with a small state held by this rank.
        gone: Why no more come, or "".
    """

    def __init__(self, channel: RankStore, partners: Sequence[int]) -> None:
        """`partners`: for every rank, the rank that holds its own state."""
        self._rank, self._size = channel.world.rank, channel.world.size
        self._partners = tuple(partners)
        self.owners = [owner for owner, p in enumerate(partners) if p == self._rank]
        self.failure = ""
        self._channel = channel.scoped("small").connection()
        self._groups: dict[int, Exchange] = {}
        self._queue: queue.SimpleQueue[StepState | None] = queue.SimpleQueue()
        self._number = 0
        self._closed = False
        self._thread = threads.thread(self._work, "trainckpt-small")
        self._thread.start()

    def send(self, moment: StepState) -> None:
        """Queue a state for its partner. Training thread; all ranks the same ones, in the same
        order.
        """
        self._queue.put(moment)

    def close(self) -> None:
        """End the exchange: other ranks that leave are no sign of a failure any more.

        Joins the thread: to destroy a group while the interpreter ends would abort the process,
        whatever its exit code was to be.
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
                    self.failure = getattr(error, "message", str(error)) or repr(error)
                break
        self._groups = {}

    def _exchange(self, moment: StepState) -> None:
        _ = moment.small.head
        self._join()
        mine = self._groups[self._rank]
        lengths = {owner: bytearray(LENGTH_BYTES) for owner in self.owners}
        length = bytearray(len(moment.small.memory).to_bytes(LENGTH_BYTES, "little"))
        begun = [(mine, mine.begin([], [(1, 0, memoryview(length))]))]
        for owner, into in lengths.items():
            group = self._groups[owner]
            begun.append((group, group.begin([(0, 0, memoryview(into))], [])))
        _wait_all(begun)
        begun = [(mine, mine.begin([], [(1, 1, moment.small.memory)]))]
        received: dict[int, memoryview] = {}
        for owner, encoded in lengths.items():
            num_bytes = int.from_bytes(encoded, "little")
            if num_bytes > MAX_BYTES:
                raise NoAgreement(
                    f"rank {owner} reports an impossible size of its state, {num_bytes} bytes"
                )
            received[owner], group = private_memory(num_bytes), self._groups[owner]
            begun.append((group, group.begin([(0, 1, received[owner])], [])))
        _wait_all(begun)
        moment.kept = received

    def _count(self, moment: StepState) -> None:
        key = f"{self._number}/all"
        if self._channel.count(f"{self._number}/here") == self._size:
            self._channel.put(key, True)
            old = self._number - 2  # nobody waits for that: all have counted a later one
            self._channel.forget([f"{old}/here", f"{old}/all"] if old > 0 else [])
        else:
            self._channel.get(key, DAY_S)
        moment.safe.set()

    def _join(self) -> None:
        """Connect to the partners, in one order on all ranks."""
        if self._groups:
            return
        for owner, partner in enumerate(self._partners):
            if self._rank in (owner, partner):
                members = (owner, partner)
                self._groups[owner] = Exchange(self._channel, f"group/{owner}", members, DAY_S)


def _wait_all(begun: list[tuple[Exchange, list[tuple[object, object]]]]) -> None:
    for group, works in begun:
        group.settle(works)
