"""Survive: which moment the ranks that are left can save, and who writes whose file. Pure.

A rank reports the moments it has: its own file, files it could write for others (it holds their
small state), and whether all tensors that ranks hold alike are there. The newest moment of which
there is every rank's file is saved as it was. If there is none, and no more reports are to come,
the newest that one rank holds whole: without the state of the lost ranks it is not bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Has:
    """What a rank has of one moment.

    Attributes:
        place: `Cursor.place()`.
        files: Ranks whose files it can write as they were, itself among them.
        whole: It can write any rank's share of the tensors that all hold alike.
        carried: Gradients of the window before were there still, and may have been added to.
    """

    place: tuple[int, ...]
    files: tuple[int, ...]
    whole: bool
    carried: bool = False

    def to_json(self) -> dict[str, Any]:
        """As the others read it."""
        return {"place": self.place, "files": self.files, "whole": self.whole,
                "carried": self.carried}  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Has:
        """The inverse of `to_json`."""
        return cls(tuple(data["place"]), tuple(data["files"]), bool(data["whole"]),
                   bool(data["carried"]))  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What is saved.

    Attributes:
        place: Of the moment.
        writers: By rank: who writes its file.
        lost: Ranks of whose own state nothing is left.
        carried: As `Has`.
    """

    place: tuple[int, ...]
    writers: tuple[int, ...]
    lost: tuple[int, ...] = ()
    carried: bool = False

    def to_json(self) -> dict[str, Any]:
        """As the others read it."""
        return {"place": self.place, "writers": self.writers, "lost": self.lost,
                "carried": self.carried}  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Decision:
        """The inverse of `to_json`."""
        return cls(tuple(data["place"]), tuple(data["writers"]), tuple(data["lost"]),
                   bool(data["carried"]))  # fmt: skip


def decide(reports: Mapping[int, list[Has]], world: int, *, is_all: bool) -> Decision | None:
    """The best there is; None if there is nothing, or more reports may make it better.

    Args:
        reports: By rank, of those that have reported.
        world: Ranks of the attempt.
        is_all: Nobody else will report.
    """
    places = sorted({has.place for told in reports.values() for has in told}, reverse=True)
    moments = [
        {rank: has for rank, told in sorted(reports.items()) for has in told if has.place == place}
        for place in sorted(places, key=lambda place: (place[1], place), reverse=True)
    ]
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


def _writers(moment: Mapping[int, Has], world: int) -> list[int | None]:
    def writer(owner: int) -> int | None:
        able = [rank for rank, has in moment.items() if owner in has.files]
        return owner if owner in able else next(iter(able), None)

    return [writer(owner) for owner in range(world)]


def _decision(moment: Mapping[int, Has], writers: list[Any], lost: tuple[int, ...]) -> Decision:
    (place,) = {has.place for has in moment.values()}
    carried = any(moment[writer].carried for writer in writers)
    return Decision(place, tuple(writers), lost, carried)
