"""How each part of a resumed run was restored, and what the resume as a whole is called.

Every tracked thing, and every setting that decides bits, says how it was restored as a `Restored`.
`decide` is the one place where a word is made of them; the weakest part gives it:

    exactly, checked     "bitwise": every byte was verified, and what was restored compared with it
    replayed             "replayed and compared (loader)": loaded again, and compared as it comes
    by its own state     "as exact as StatefulDataLoader's own state (loader)": by code that is not
                         known here
    inferred, not kept   "same data, not bitwise", and a reason for each

Used by: data, state and integrations, whose objects say it; lifecycle, which decides and records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

BITWISE = "bitwise"
INEXACT = "same data, not bitwise"
_NAMED = 3  # parts that a word names


class How(Enum):
    """How a part was restored, from the strongest to the weakest."""

    CHECKED = "exactly, checked"
    REPLAYED = "replayed"
    OWN_STATE = "by its own state"
    INFERRED = "inferred"
    NOT_KEPT = "not kept"


_ORDER = {how: number for number, how in enumerate(How)}
_INEXACT = frozenset({How.INFERRED, How.NOT_KEPT})


@dataclass(frozen=True)
class Restored:
    """How one part of a run's state was restored.

    Attributes:
        name: The tracked name, such as "loader" or "scheduler", or a setting's.
        reason: A sentence that says why it is not exact; of `OWN_STATE` whose state it is, such
            as "StatefulDataLoader's own state".
    """

    name: str
    how: How
    reason: str = ""

    def to_json(self) -> dict[str, str]:
        """Return it as a record has it."""
        return {"name": self.name, "how": self.how.value, "reason": self.reason}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Restored:
        """Return what `to_json` gave."""
        return cls(value["name"], How(value["how"]), value["reason"])


Report = Callable[[Restored], None]  # told of a part as it turns out how it was restored


@dataclass(frozen=True)
class Exactness:
    """What a resume is called.

    Attributes:
        word: For the record: `BITWISE`, `INEXACT`, or what it is as exact as.
        weaker: The parts that were not restored exactly and checked, the weakest first.
    """

    word: str
    weaker: tuple[Restored, ...] = ()

    @property
    def line(self) -> str:
        """The word, naming the parts that it comes from."""
        return f"{self.word}: {_some(self._inexact)}" if self._inexact else self.word

    @property
    def reasons(self) -> list[str]:
        """Why it is not bitwise, a sentence each; none where nothing speaks against it."""
        return [part.reason for part in self._inexact]

    @property
    def _inexact(self) -> list[Restored]:
        return [part for part in self.weaker if part.how in _INEXACT]


def decide(parts: Iterable[Restored]) -> Exactness:
    """Return what a resume is called, by the weakest of its parts.

    Example: a loader that was restored by its own state, and all else exactly, is "as exact as
    StatefulDataLoader's own state (loader)".
    """
    found = dict.fromkeys(part for part in parts if part.how is not How.CHECKED)
    weaker = tuple(sorted(found, key=lambda part: -_ORDER[part.how]))
    if not weaker:
        return Exactness(BITWISE)
    weakest = [part for part in weaker if part.how is weaker[0].how]
    if weaker[0].how is How.OWN_STATE:
        whose = dict.fromkeys(f"{part.reason} ({part.name})" for part in weakest)
        return Exactness(f"as exact as {' and '.join(whose)}", weaker)
    if weaker[0].how is How.REPLAYED:
        return Exactness(f"replayed and compared ({_some(weakest)})", weaker)
    return Exactness(INEXACT, weaker)


def _some(parts: Iterable[Restored]) -> str:
    names = list(dict.fromkeys(part.name for part in parts))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
