"""Carry the rounds, in which the ranks agree on a stop or a save, through the store.

`decision.py` has the messages, and computes a round's decision from the publications of all ranks.
The keys in the store, in the order of writing:

    <k>/of/<rank>       the rank's publication; 1st
    bell/<rank>/<k>     set for every rank by the rank that opens round k with a request; 2nd.
                        Each rank's answering thread waits for its own bell. Only the
                        rank itself or an opener sets it, so a rank can wake itself to leave
                        without disturbing others
    <k>/answers         counter of publications; 3rd. The rank that brings it to the world size,
                        departed ranks included, proposes at once: few messages per rank
    <k>/decision        the first proposal stands
    final/<rank>        the count of a departed rank; its answer to all later rounds
    left                counter of departed ranks

The store keeps a key until it is deleted, and a run saves for weeks. So each publication names the
round up to which its rank has read all decisions, and each decision the least of these: keys up to
there have no reader any more. A rank's answering thread deletes the rank's own keys, rank 0's the
rest: only the thread waiting for a bell knows that it waits for a later one.

No collective here, and nothing blocks but `wait_for_bell`.
Threads: the watcher's, and any that leaves.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import NoAgreement
from trainckpt.ranks.decision import Decision, Publication, decide, decide_without

if TYPE_CHECKING:
    from trainckpt.ranks.store import RankStore


class Rounds:
    """One rank's view of the rounds, over one store connection."""

    def __init__(self, channel: RankStore) -> None:
        self._channel = channel
        self._rank, self._size = channel.world.rank, channel.world.size
        self._forgotten = 0  # rounds up to this one

    def publish(self, publication: Publication) -> Decision | None:
        """Publish this rank's answer. Return the decision if it was the last one missing."""
        k = publication.round
        self._channel.put(f"{k}/of/{self._rank}", publication.as_json())
        if (notice := publication.notice) is not None:
            ring = {"by": self._rank, "seconds_left": notice.seconds_left, "action": notice.action}
            self._channel.put_all({f"bell/{rank}/{k}": ring for rank in range(self._size)})
        answers = self._channel.count(f"{k}/answers")
        if answers + self._channel.count("left", 0) < self._size:
            return None
        return self.try_to_decide(k)

    def publish_final(self, publication: Publication) -> None:
        """Publish this rank's departure: its answer to every unanswered round."""
        self._channel.put(f"final/{self._rank}", publication.as_json())
        self._channel.count("left")

    def try_to_decide(self, k: int) -> Decision | None:
        """Propose a decision if all publications exist; return the one that stands, or None."""
        found = self._publications(k)
        return self._propose(decide(found)) if len(found) == self._size else None

    def give_up(self, k: int) -> Decision:
        """Propose "failed" after the time limit; a decision may stand already and is returned
        instead."""
        decision = self.try_to_decide(k)
        return decision or self._propose(decide_without(self._publications(k), self._size, k))

    def decision(self, k: int) -> Decision | None:
        """Return the decision of round `k`, or None."""
        value = self._channel.peek(f"{k}/decision")
        return None if value is None else Decision.from_json(value)

    def wait_for_bell(self, k: int, timeout_s: float) -> None:
        """Block until this rank's bell for round `k` is set. Needs its own connection: it stalls
        others."""
        self._channel.wait(f"bell/{self._rank}/{k}", timeout_s)

    def bell(self, k: int) -> dict[str, Any] | None:
        """Return the value of this rank's bell for round `k`, if set."""
        value = self._channel.peek(f"bell/{self._rank}/{k}")
        return value if isinstance(value, dict) else None

    def forget(self, settled: int) -> None:
        """Delete keys of rounds whose decisions every rank has read, up to `settled`. Answering
        thread.

        The last of them stays: another thread of a slow rank may just be reading it, and a store
        waits for minutes for a key that existed at the time of the call.
        """
        settled -= 1
        rounds = range(self._forgotten + 1, settled + 1)
        keys = [key for k in rounds for key in (f"{k}/of/{self._rank}", f"bell/{self._rank}/{k}")]
        if self._rank == 0:
            keys += [key for k in rounds for key in (f"{k}/answers", f"{k}/decision")]
        self._forgotten = max(self._forgotten, settled)
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to forget
            self._channel.forget(keys)

    def wake_answering(self, k: int) -> None:
        """Set this rank's own bell to wake its answering thread."""
        self._channel.put(f"bell/{self._rank}/{k}", {"by": self._rank, "seconds_left": None})

    def _propose(self, decision: Decision) -> Decision:
        stands = self._channel.propose(f"{decision.round}/decision", decision.as_json())
        return Decision.from_json(stands)

    def _publications(self, k: int) -> list[Publication]:
        answers = self._channel.peek_all([f"{k}/of/{rank}" for rank in range(self._size)])
        found = []
        for rank, answer in enumerate(answers):
            # A final count was published for no round in particular.
            value = answer if answer is not None else self._channel.peek(f"final/{rank}")
            if value is not None:
                found.append(replace(Publication.from_json(value), round=k))
        return found


class Undecided(NamedTuple):
    """A round opened by this rank; monotonic times."""

    opened_s: float
    give_up_s: float
    stops: bool  # a rank wants to stop in it

    def now_left(self, seconds_left: float | None) -> float | None:
        """Return the rest of `seconds_left`, which was true when the round was opened."""
        return None if seconds_left is None else seconds_left - (time.monotonic() - self.opened_s)


def decide_within(timeout_s: float, seconds_left: float | None) -> float:
    """Return how long a round may stay undecided: half of the time left, the rest is for the save.

    At least a second, though: giving up sooner would only make the loss certain.
    """
    return timeout_s if seconds_left is None else min(timeout_s, max(seconds_left / 2, 1.0))
