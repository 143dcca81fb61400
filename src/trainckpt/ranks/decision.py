"""What ranks tell each other about a round, and the decision that follows from it.

Values and one pure function; semantics section 3. A round goes:

    wish          a notice on some rank: stop or save (none, on a rank that merely answers)
    publication   every rank: how many boundaries it has passed, and its wish
    decision      `decide` of all publications, or "failed" if some did not come in time

As all ranks read one decision, and each acts on it at its first boundary beyond `bound`, all act
at the same boundary. Values from other ranks are checked here, when they are read.

Floor 1. Uses: errors. Used by: this room and lifecycle.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from trainckpt.errors import NoAgreement

if TYPE_CHECKING:
    from collections.abc import Sequence

Action = Literal["stop", "save"]
Mode = Literal["micro-batch", "window"]

STRICTNESS: dict[Mode, int] = {"micro-batch": 2, "window": 1}


@dataclass(frozen=True)
class Wish:
    """What one rank asks of all.

    Attributes:
        number: For `ckpt.save()`: the how-manieth call of its rank this was, from 1. Calls with
            one number, on whatever ranks, ask for one save. None: any save will do.
    """

    reason: str
    action: Action
    mode: Mode = "micro-batch"
    seconds_left: float | None = None
    tag: str | None = None
    number: int | None = None

    @classmethod
    def from_json(cls, value: Any) -> Wish:
        """Read what `asdict` wrote. Raises NoAgreement for anything else."""
        return cls(
            reason=_text(value, "reason"),
            action=_one_of(value, "action", ("stop", "save")),
            mode=_one_of(value, "mode", ("micro-batch", "window")),
            seconds_left=_number(value, "seconds_left"),
            tag=None if value.get("tag") is None else _text(value, "tag"),
            number=None if value.get("number") is None else _integer(value, "number"),
        )


@dataclass(frozen=True)
class Publication:
    """One rank's answer to a round.

    Attributes:
        round: From 1, in the order of the attempt.
        passed: Boundaries the rank had passed when it opened the round; it passes no other
            before it knows the decision.
        can_save: Whether it could take a save now.
        settled: It has read the decisions of all rounds up to this one.
    """

    round: int
    rank: int
    passed: int
    can_save: bool = True
    wish: Wish | None = None
    settled: int = 0

    def as_json(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Publication:
        """Read what `as_json` wrote. Raises NoAgreement for anything else."""
        wish = _member(value, "wish")
        return cls(
            round=_integer(value, "round"),
            rank=_integer(value, "rank"),
            passed=_integer(value, "passed"),
            can_save=_member(value, "can_save") is True,
            wish=None if wish is None else Wish.from_json(wish),
            settled=_integer(value, "settled"),
        )


@dataclass(frozen=True)
class Decision:
    """One round's outcome, the same on every rank.

    Attributes:
        bound: Each rank acts at its first boundary with passed + 1 > bound.
        failed: A save that all skip, or a stop that ends every rank with 71.
        why: Why it failed.
        number, tag: Of the save that was chosen.
        settled: Every rank has read the decisions of all rounds up to this one.
    """

    round: int
    action: Action
    bound: int
    mode: Mode = "micro-batch"
    reason: str = ""
    seconds_left: float | None = None
    tag: str | None = None
    number: int | None = None
    failed: bool = False
    why: str = ""
    settled: int = 0

    def as_json(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Decision:
        """Read what `as_json` wrote. Raises NoAgreement for anything else."""
        wish = Wish.from_json(value)
        return cls(
            round=_integer(value, "round"),
            bound=_integer(value, "bound"),
            failed=_member(value, "failed") is True,
            why=_text(value, "why"),
            settled=_integer(value, "settled"),
            **asdict(wish),
        )


def decide(publications: Sequence[Publication]) -> Decision:
    """The decision that follows from all publications of a round. Pure; order does not matter.

    Stop before save; the strictest mode (micro-batch before window); the smallest time left; the
    largest `passed` as bound. Of several numbered saves the lowest number is taken, the others
    get later rounds. A save is skipped (failed) unless every rank can save.

    Example: ranks that have passed 7, 9 and 8 boundaries, the second of which wants to stop,
    get bound 9: each trains up to its 9th boundary and stops at the next.
    """
    ordered = sorted(publications, key=lambda publication: publication.rank)
    wishes = [publication.wish for publication in ordered if publication.wish is not None]
    chosen = _chosen(wishes) or Wish("nobody asks for it any more", "save")
    unable = [publication.rank for publication in ordered if not publication.can_save]
    why = f"rank {', '.join(map(str, unable))} cannot save now" if unable else ""
    if not wishes:
        why = chosen.reason
    decision = Decision(
        round=ordered[0].round,
        bound=max(publication.passed for publication in ordered),
        settled=min(publication.settled for publication in ordered),
        **asdict(chosen),
    )
    if chosen.action == "save" and why:
        return replace(decision, failed=True, why=why)
    return decision


def decide_without(publications: Sequence[Publication], world_size: int, round_: int) -> Decision:
    """The failed decision of a round whose time ran out while publications were missing."""
    missing = sorted(set(range(world_size)) - {publication.rank for publication in publications})
    why = f"no answer from rank {', '.join(map(str, missing))} in time"
    if not publications:
        return Decision(round_, "save", bound=0, failed=True, why=why)
    return replace(decide(publications), failed=True, why=why, settled=0)


def strictest(one: Mode, other: Mode) -> Mode:
    """The mode that binds more: micro-batch before window."""
    return max(one, other, key=lambda mode: STRICTNESS[mode])


def _chosen(wishes: Sequence[Wish]) -> Wish | None:
    stops = [wish for wish in wishes if wish.action == "stop"]
    if stops:
        chosen = max(stops, key=lambda wish: STRICTNESS[wish.mode])
        return replace(chosen, seconds_left=_smallest(stops), number=None)
    numbered = [wish for wish in wishes if wish.number is not None]
    if numbered:
        return min(numbered, key=lambda wish: wish.number or 0)
    return wishes[0] if wishes else None


def _smallest(wishes: Sequence[Wish]) -> float | None:
    return min((w.seconds_left for w in wishes if w.seconds_left is not None), default=None)


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
