"""Let the ranks agree on the boundary of a stop or save, in rounds carried through the store.

`decide` computes a round's decision from the publications of all ranks. The keys in the store, in
the order of writing:

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
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.notice import Mode
    from trainckpt.ranks.store import RankStore


# ---- the messages of a round, and the decision computed from them
#
# Values and one pure function. A round goes:
#
#     notice        on some rank: stop or save (none, on a rank that merely answers)
#     publication   every rank: its number of passed boundaries, and its notice
#     decision      `decide` of all publications, or "failed" if some did not come in time
#
# As all ranks read one decision, and each acts on it at its first boundary beyond `bound`, all act
# at the same boundary. Values from other ranks are checked here, as they are read.


# None: no stop is known
STRICTNESS: dict[Mode | None, int] = {"micro-batch": 2, "window": 1, None: 0}


@dataclass(frozen=True)
class Publication:
    """One rank's answer to a round.

    Attributes:
        round: From 1, in the order of the attempt.
        passed: Boundaries passed by the rank when it opened the round; it passes no other before it
            knows the decision.
        can_save: True if the rank could take a save now.
        settled: The rank has read the decisions of all rounds up to this one.
    """

    round: int
    rank: int
    passed: int
    can_save: bool = True
    notice: Notice | None = None
    settled: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON for the store."""
        body = asdict(self)
        return {**body, "wish": body.pop("notice")}

    @classmethod
    def from_json(cls, value: Any) -> Publication:
        """Parse the output of `as_json`. Raise NoAgreement for anything else."""
        notice = _member(value, "wish")
        return cls(
            round=_integer(value, "round"),
            rank=_integer(value, "rank"),
            passed=_integer(value, "passed"),
            can_save=_member(value, "can_save") is True,
            notice=None if notice is None else _parse_notice(notice),
            settled=_integer(value, "settled"),
        )


@dataclass(frozen=True)
class Decision:
    """One round's outcome, the same on every rank.

    Attributes:
        bound: Each rank acts at its first boundary with passed + 1 > bound.
        notice: The notice to act on.
        failed: True for a save that all skip, or a stop that ends every rank with 71.
        why: Reason of the failure.
        settled: Every rank has read the decisions of all rounds up to this one.
    """

    round: int
    bound: int
    notice: Notice
    failed: bool = False
    why: str = ""
    settled: int = 0

    @property
    def stops(self) -> bool:
        """Return True if the attempt ends with it, False for a save."""
        return self.notice.action == "stop"

    def as_json(self) -> dict[str, Any]:
        """Return it as flat JSON for the store."""
        body = asdict(self)
        return {**body, **body.pop("notice")}

    @classmethod
    def from_json(cls, value: Any) -> Decision:
        """Parse the output of `as_json`. Raise NoAgreement for anything else."""
        return cls(
            round=_integer(value, "round"),
            bound=_integer(value, "bound"),
            notice=_parse_notice(value),
            failed=_member(value, "failed") is True,
            why=_text(value, "why"),
            settled=_integer(value, "settled"),
        )


def decide(publications: Sequence[Publication]) -> Decision:
    """Return the decision for all publications of a round. Pure; order does not matter.

    Stop before save; the strictest mode (micro-batch before window); the smallest time left; the
    largest `passed` as bound. Of several numbered saves the lowest number is taken, the others get
    later rounds. A save is skipped (failed) unless every rank can save.

    Example: three ranks have passed 7, 9 and 8 boundaries, and the second asks for a stop. They get
    bound 9: each trains up to its 9th boundary and stops at the next.
    """
    ordered = sorted(publications, key=lambda publication: publication.rank)
    notices = [publication.notice for publication in ordered if publication.notice is not None]
    chosen = _chosen(notices) or Notice("every rank withdrew its request", "save", "micro-batch")
    unable = [publication.rank for publication in ordered if not publication.can_save]
    why = f"rank {', '.join(map(str, unable))} cannot save now" if unable else ""
    if not notices:
        why = chosen.reason
    decision = Decision(
        round=ordered[0].round,
        bound=max(publication.passed for publication in ordered),
        notice=chosen,
        settled=min(publication.settled for publication in ordered),
    )
    if chosen.action == "save" and why:
        return replace(decision, failed=True, why=why)
    return decision


def decide_without(publications: Sequence[Publication], world_size: int, round_: int) -> Decision:
    """Return the failed decision of a round that timed out with publications missing."""
    missing = sorted(set(range(world_size)) - {publication.rank for publication in publications})
    why = f"no answer from rank {', '.join(map(str, missing))} in time"
    if not publications:
        nothing = Notice("", "save", "micro-batch")
        return Decision(round_, bound=0, notice=nothing, failed=True, why=why)
    return replace(decide(publications), failed=True, why=why, settled=0)


def strictest(one: Mode | None, other: Mode | None) -> Mode | None:
    """Return the stricter mode: micro-batch before window, and any before none."""
    return max(one, other, key=lambda mode: STRICTNESS[mode])


def _chosen(notices: Sequence[Notice]) -> Notice | None:
    stops = [notice for notice in notices if notice.action == "stop"]
    if stops:
        chosen = max(stops, key=lambda notice: STRICTNESS[notice.mode])
        lefts = [notice.seconds_left for notice in stops if notice.seconds_left is not None]
        return replace(chosen, seconds_left=min(lefts, default=None), number=None)
    numbered = [notice for notice in notices if notice.number is not None]
    if numbered:
        return min(numbered, key=lambda notice: notice.number or 0)
    return notices[0] if notices else None


def _parse_notice(value: Any) -> Notice:
    """Parse a notice of another rank. Raise NoAgreement for anything else."""
    return Notice(
        reason=_text(value, "reason"),
        action=_one_of(value, "action", ("stop", "save")),
        mode=_one_of(value, "mode", ("micro-batch", "window")),
        seconds_left=_number(value, "seconds_left"),
        tag=None if value.get("tag") is None else _text(value, "tag"),
        number=None if value.get("number") is None else _integer(value, "number"),
    )


def _member(value: Any, name: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise NoAgreement(f"a rank published something that is no answer to a round: {value!r}")
    return value[name]


def _integer(value: Any, name: str) -> int:
    member = _member(value, name)
    if not isinstance(member, int) or isinstance(member, bool) or member < 0:
        raise NoAgreement(f"a rank published {name} = {member!r}, which is no count")
    return member


def _number(value: Any, name: str) -> float | None:
    member = _member(value, name)
    if member is not None and (not isinstance(member, (int, float)) or isinstance(member, bool)):
        raise NoAgreement(f"a rank published {name} = {member!r}, which is no number")
    return member


def _text(value: Any, name: str) -> str:
    member = _member(value, name)
    if not isinstance(member, str):
        raise NoAgreement(f"a rank published {name} = {member!r}, which is no text")
    return member


def _one_of(value: Any, name: str, allowed: Sequence[str]) -> Any:
    member = _member(value, name)
    if member not in allowed:
        raise NoAgreement(f"a rank published {name} = {member!r}, none of {', '.join(allowed)}")
    return member


# ---- rounds, carried through the store


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
    stops: bool  # somebody wants to stop in it

    def now_left(self, seconds_left: float | None) -> float | None:
        """Return the rest of `seconds_left`, which was true when the round was opened."""
        return None if seconds_left is None else seconds_left - (time.monotonic() - self.opened_s)


def decide_within(timeout_s: float, seconds_left: float | None) -> float:
    """Return how long a round may stay undecided: half of the time left, the rest is for the save.

    At least a second, though: giving up sooner would only make the loss certain.
    """
    return timeout_s if seconds_left is None else min(timeout_s, max(seconds_left / 2, 1.0))
