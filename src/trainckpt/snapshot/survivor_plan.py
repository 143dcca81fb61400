"""Choose the step the surviving ranks save, and the writer of each rank's file. Pure.

A rank reports its steps in memory. For each: its own file, files it can write for others (it has
their small state), and whether it has all replicated tensors. The newest step with every rank's
file is saved exactly. If there is none and every report is in, the newest step that one rank has
whole is saved; without the lost ranks' own state it is not bitwise. A step whose replicas have
drifted apart is never saved: its file would mix the weights of several ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class SurvivorHoldings:
    """A rank's state of one step.

    Attributes:
        place: `Cursor.place()`.
        files: Ranks whose files it can write exactly, itself among them.
        whole: It can write any rank's share of the replicated tensors.
        carried: Gradients of an earlier window still existed and may have been added to.
        samples: Digests of a few bytes of the replicated tensors, on this rank and on those whose
            small state it has; one, if they are equal.
    """

    place: tuple[int, ...]
    files: tuple[int, ...]
    whole: bool
    carried: bool = False
    samples: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, to send to the other ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> SurvivorHoldings:
        """Return the value from `to_json`."""
        return cls(
            tuple(data["place"]),
            tuple(data["files"]),
            bool(data["whole"]),
            bool(data["carried"]),
            tuple(data["samples"]),
        )


@dataclass(frozen=True)
class SurvivorDecision:
    """The step to save, and the writers.

    Attributes:
        place: The step's `Cursor.place()`.
        writers: By rank: the writer of its file.
        lost: Ranks whose own state is lost.
        carried: As in `SurvivorHoldings`.
    """

    place: tuple[int, ...]
    writers: tuple[int, ...]
    lost: tuple[int, ...] = ()
    carried: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, to send to the other ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> SurvivorDecision:
        """Return the value from `to_json`."""
        return cls(
            tuple(data["place"]), tuple(data["writers"]), tuple(data["lost"]), bool(data["carried"])
        )


def decide(
    reports: Mapping[int, list[SurvivorHoldings]], world: int, *, is_all: bool
) -> SurvivorDecision | None:
    """Return the best decision; None if there is none, or more reports may improve it.

    Args:
        reports: By rank, from ranks that have reported.
        world: Ranks of the attempt.
        is_all: No more reports will come.
    """
    places = sorted({has.place for report in reports.values() for has in report}, reverse=True)
    moments = [
        {
            rank: has
            for rank, report in sorted(reports.items())
            for has in report
            if has.place == place
        }
        for place in sorted(places, key=lambda place: (place[1], place), reverse=True)
    ]
    moments = [moment for moment in moments if _is_alike(moment)]
    for moment in moments:
        writers = _writers(moment, world)
        if None not in writers:
            return _decision(moment, writers, ())
    for moment in moments if is_all else ():
        spare = next((rank for rank, has in moment.items() if has.whole), None)
        if spare is not None:
            writers = _writers(moment, world)
            lost = tuple(owner for owner, writer in enumerate(writers) if writer is None)
            return _decision(moment, [spare if w is None else w for w in writers], lost)
    return None


def _is_alike(moment: Mapping[int, SurvivorHoldings]) -> bool:
    return len({sample for has in moment.values() for sample in has.samples}) < 2


def _writers(moment: Mapping[int, SurvivorHoldings], world: int) -> list[int | None]:
    def writer(owner: int) -> int | None:
        able = [rank for rank, has in moment.items() if owner in has.files]
        return owner if owner in able else next(iter(able), None)

    return [writer(owner) for owner in range(world)]


def _decision(
    moment: Mapping[int, SurvivorHoldings], writers: list[Any], lost: tuple[int, ...]
) -> SurvivorDecision:
    (place,) = {has.place for has in moment.values()}
    carried = any(moment[writer].carried for writer in writers)
    return SurvivorDecision(place, tuple(writers), lost, carried)
