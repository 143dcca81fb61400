"""Agree on a boundary: compute one decision from the answers of all ranks, by `decide`, a pure
function.

    notice        on some rank: stop or save (none, on a rank that merely answers)
    publication   every rank: its number of passed boundaries, and its notice
    decision      `decide` of all publications, or "failed" if some did not come in time

As all ranks read one decision, and each acts on it at its first boundary beyond `bound`, all act at
the same boundary. `rounds.py` carries these messages; values from other ranks are checked here, as
they are read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.notice import Mode


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
