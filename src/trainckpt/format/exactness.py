"""Classify how exactly a run was resumed, from its parts.

Every tracked object, and every setting with influence on bits, reports a `Restored`. `decide` alone
turns these into a word; the weakest part decides:

    exactly, checked     "bitwise": every byte was verified, and the restored state compared with it
    replayed             "replayed and compared (loader)": loaded again, and compared on the way
    by its own state     "as exact as StatefulDataLoader's own state (loader)": by code unknown here
    inferred, not kept   "same data, not bitwise", and a reason for each

Data, state and integrations report; `resume.exactness_report` decides, and `stop.shutdown`
records. `reasons` lists what a snapshot saved by the survivors of dead ranks lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


BITWISE = "bitwise"
INEXACT = "same data, not bitwise"
_NAMED = 3  # parts listed in a word


class How(Enum):
    """Kinds of restore, from the strongest to the weakest."""

    CHECKED = "exactly, checked"
    REPLAYED = "replayed"
    OWN_STATE = "by its own state"
    INFERRED = "inferred"
    NOT_KEPT = "not kept"


_ORDER = {how: number for number, how in enumerate(How)}
_INEXACT = frozenset({How.INFERRED, How.NOT_KEPT})


@dataclass(frozen=True)
class Restored:
    """One part of a run's state and how it was restored.

    Attributes:
        name: The tracked name, such as "loader" or "scheduler", or a setting's.
        how: The kind of restore.
        reason: A sentence why it is not exact; for `OWN_STATE` the owner of the state, such as
            "StatefulDataLoader's own state".
        rank: The rank that reported it, where rank 0 did not; else None.
    """

    name: str
    how: How
    reason: str = ""
    rank: int | None = None

    @property
    def is_inexact(self) -> bool:
        """Return True if a resume with this part is not bitwise."""
        return self.how in _INEXACT

    @property
    def where(self) -> str:
        """Return the name, with the rank where it is not rank 0."""
        return self.name if self.rank is None else f"{self.name} on rank {self.rank}"

    @property
    def sentence(self) -> str:
        """Return the reason, after the rank where it is not rank 0."""
        return self.reason if self.rank is None else f"rank {self.rank}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return it as in a record."""
        found = {"name": self.name, "how": self.how.value, "reason": self.reason}
        return found if self.rank is None else {**found, "rank": self.rank}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Restored:
        """Return the value from `to_json`."""
        return cls(value["name"], How(value["how"]), value["reason"], value.get("rank"))


Report = Callable[[Restored], None]  # called with each part once its kind of restore is known


@dataclass(frozen=True)
class Exactness:
    """The classification of a resume.

    Attributes:
        word: For the record: `BITWISE`, `INEXACT`, or the phrase of the weakest part.
        weaker: The parts not restored exactly and checked, the weakest first.
    """

    word: str
    weaker: tuple[Restored, ...] = ()

    @property
    def line(self) -> str:
        """Return the word, with the parts responsible."""
        return f"{self.word}: {_some(self._inexact)}" if self._inexact else self.word

    @property
    def reasons(self) -> list[str]:
        """Return why it is not bitwise, one sentence each; empty if no part is inexact."""
        return [part.sentence for part in self._inexact]

    @property
    def _inexact(self) -> list[Restored]:
        return [part for part in self.weaker if part.is_inexact]


def decide(parts: Iterable[Restored]) -> Exactness:
    """Return the classification given by the weakest part.

    Example: a loader restored by its own state, and all else exactly, is "as exact as
    StatefulDataLoader's own state (loader)".
    """
    found = dict.fromkeys(part for part in parts if part.how is not How.CHECKED)
    weaker = tuple(sorted(found, key=lambda part: -_ORDER[part.how]))
    if not weaker:
        return Exactness(BITWISE)
    weakest = [part for part in weaker if part.how is weaker[0].how]
    if weaker[0].how is How.OWN_STATE:
        whose = dict.fromkeys(f"{part.reason} ({part.where})" for part in weakest)
        return Exactness(f"as exact as {' and '.join(whose)}", weaker)
    if weaker[0].how is How.REPLAYED:
        return Exactness(f"replayed and compared ({_some(weakest)})", weaker)
    return Exactness(INEXACT, weaker)


def _some(parts: Iterable[Restored]) -> str:
    names = list(dict.fromkeys(part.where for part in parts))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def reasons(lost: Sequence[int], *, carried: bool) -> list[str]:
    """Return why no resume from the snapshot can be bitwise, one sentence each.

    Args:
        lost: Ranks whose own state is lost.
        carried: Gradients from before the window may have counted, and are missing.
    """
    ranks = ", ".join(map(str, lost[:20]))
    found = [f"rank {ranks} died with all that was its own"] if lost else []
    if carried:
        found.append("gradients that its window began with died with the ranks that held them")
    return found


def parse_lost(body: Mapping[str, Any], world: int, what: str) -> tuple[int, ...]:
    """Return the manifest's `lost`; raise `UnusableSnapshot` if it does not list ranks."""
    found = body.get("lost", [])
    if type(found) is not list or any(
        type(rank) is not int or not 0 <= rank < world for rank in found
    ):
        raise UnusableSnapshot(f"{what}: {str(found)[:60]} are not ranks that were lost")
    return tuple(found)
