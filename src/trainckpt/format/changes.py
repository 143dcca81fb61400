"""Differences between the script and its snapshot: their kinds, and the value that counts. Pure.

    script      the script's value counts
    snapshot    the snapshot's value counts
    refuse      the resume is refused, with all differences

`resume.script_changes` finds the differences; the option `changed` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SCRIPT, SNAPSHOT, REFUSE = "script", "snapshot", "refuse"
LEARNING_RATE, WEIGHT_DECAY, OPTIMIZER = "learning rate", "weight decay", "optimizer"
SCHEDULE, DROPOUT, ACCUMULATION = "schedule", "dropout", "accumulation"
BATCH_SIZE, DATASET_LENGTH, SAMPLER = "batch size", "dataset length", "sampler"
ARGUMENTS, GIT_COMMIT = "arguments", "git commit"
# kind -> what can be chosen for it, the default first
KINDS: dict[str, tuple[str, ...]] = {
    LEARNING_RATE: (SNAPSHOT, SCRIPT, REFUSE),
    WEIGHT_DECAY: (SNAPSHOT, SCRIPT, REFUSE),
    OPTIMIZER: (SNAPSHOT, SCRIPT, REFUSE),
    SCHEDULE: (SNAPSHOT, SCRIPT, REFUSE),
    DROPOUT: (SCRIPT, SNAPSHOT, REFUSE),
    ACCUMULATION: (SCRIPT, REFUSE),
    BATCH_SIZE: (REFUSE, SCRIPT),
    DATASET_LENGTH: (REFUSE, SCRIPT),
    SAMPLER: (REFUSE, SCRIPT),
    ARGUMENTS: (SCRIPT, REFUSE),
    GIT_COMMIT: (SCRIPT, REFUSE),
}
RECORDED_CHANGES = "changes"  # in the attempt's record
_CHANGE_NOTHING = (ARGUMENTS, GIT_COMMIT)  # by themselves
Choices = tuple[tuple[str, str], ...]


def parse_choices(value: Any) -> Choices:
    """Parse "learning rate: script, dropout: refuse", or the same as a mapping.

    Raises:
        ValueError: a kind is unknown, or has no such choice.
    """
    if isinstance(value, Mapping):
        pairs = [(str(kind), str(choice)) for kind, choice in value.items()]
    elif isinstance(value, str):
        parts = [part.partition(":") for part in value.split(",")]
        pairs = [(kind.strip(), choice.strip()) for kind, _, choice in parts]
    else:
        pairs = [(kind, choice) for kind, choice in value]
    if len(dict(pairs)) < len(pairs) or any(choice not in KINDS[kind] for kind, choice in pairs):
        raise ValueError(value)
    return tuple(pairs)


def choice_by_kind(choices: Choices = ()) -> dict[str, str]:
    """Return kind -> choice, for every kind."""
    return {kind: allowed[0] for kind, allowed in KINDS.items()} | dict(choices)


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        kind: One of `KINDS`.
        name: The value's name: "optimizer lr", "scheduler.T_max", "loader".
        saved: The snapshot's value, as text.
        given: The script's value, as text.
        used: `SCRIPT`, `SNAPSHOT` or `REFUSE`.
    """

    kind: str
    name: str
    saved: str
    given: str
    used: str

    @property
    def trains_otherwise(self) -> bool:
        """Return True if the training goes on with another value than the snapshot's."""
        return self.used == SCRIPT and self.kind not in _CHANGE_NOTHING

    @property
    def sentence(self) -> str:
        """Return the difference as a sentence."""
        return f"{self.kind}: {self.name} was {self.saved}, is {self.given}"

    def to_json(self) -> dict[str, str]:
        """Return it as in a record."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Change:
        """Return the value from `to_json`."""
        names = ("kind", "name", "saved", "given", "used")
        return cls(*(str(value.get(name, "")) for name in names))


def table(changes: Iterable[Change]) -> str:
    """Return an aligned table: a line of heads, and one line for each change."""
    rows: list[Sequence[str]] = [("kind", "name", "snapshot", "script", "used")]
    rows += [(c.kind, c.name, c.saved, c.given, c.used) for c in changes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(f"  {line}" for line in lines)
