"""Describe a live attempt in its heartbeat: rank 0 writes it, any process reads it.

A reader takes what is of the declared type and in range, and the default for anything else: the
content comes from another process, perhaps of another release.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from trainckpt.format.attempt_times import LARGEST, TIMES, AttemptTimes
from trainckpt.format.duration import MOST_S
from trainckpt.format.save_history import LONGEST, NotKept

T = TypeVar("T")
MOST_ITEMS = 64

# phase
STARTING, TRAINING, EVALUATING, LEAVING = "starting", "training", "evaluating", "leaving"


@dataclass(frozen=True, kw_only=True)
class SavingNow:
    """The save that is being written.

    Attributes:
        snapshot: Full name.
        num_bytes: Of the whole state.
        file_bytes: Of rank 0's file, which grows in the run directory meanwhile.
        seconds: Since its boundary.
        predicted_s: From its boundary to the commit, as measured before; None: nothing was.
        in_memory: It stays in the hosts' memory.
    """

    snapshot: str = ""
    num_bytes: int = 0
    file_bytes: int = 0
    seconds: float = 0.0
    predicted_s: float | None = None
    in_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class UploadNow:
    """Copies to one slower tier.

    Attributes:
        tier: Its name.
        newest: Full name of the newest snapshot there; "": none is known.
        snapshot: Full name of the one that is being copied; "": none.
        num_bytes, copied_bytes: Rank 0's share of it.
        seconds_left: None: nothing was measured.
        waiting, skipped, failed: Snapshots that wait; that were left out; tries that failed.
        trouble: Why copies are late, or "".
    """

    tier: str = ""
    newest: str = ""
    snapshot: str = ""
    num_bytes: int = 0
    copied_bytes: int = 0
    seconds_left: float | None = None
    waiting: int = 0
    skipped: int = 0
    failed: int = 0
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class NextSave:
    """When the next save is due. Both are None without a schedule.

    Attributes:
        at_step: By number of steps.
        in_s: By time.
        in_memory: It stays in the hosts' memory.
    """

    at_step: int | None = None
    in_s: float | None = None
    in_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class StopNow:
    """A stop that the ranks have agreed on.

    Attributes:
        reason: Of the notice; "": another rank's.
        seconds_left: Until the deadline; None: there is none.
    """

    reason: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class LiveStatus:
    """State of one live attempt.

    Attributes:
        written: Seconds since the Unix epoch, by rank 0's clock.
        phase: `STARTING`, `TRAINING`, `EVALUATING` or `LEAVING`.
        micro_batch_s: Median of the last micro-batches; None: not known yet.
        window: Micro-batches of the last step; None: not known yet.
        saving, stop: None: nothing of the kind.
        next_saves: The next save of each kind.
        skipped, failed: Number of saves of the attempt without a snapshot.
        not_saved: The last of them, oldest first.
        uploads: One for each slower tier.
        in_memory: Full name of the newest snapshot in this host's memory; "": none.
        replicated: Full name of the newest that other hosts hold as well; "": none.
        replicates: Snapshots are replicated to other hosts.
    """

    written: float = 0.0
    phase: str = STARTING
    micro_batch_s: float | None = None
    window: int | None = None
    saving: SavingNow | None = None
    stop: StopNow | None = None
    next_saves: tuple[NextSave, ...] = ()
    skipped: int = 0
    failed: int = 0
    not_saved: tuple[NotKept, ...] = ()
    uploads: tuple[UploadNow, ...] = ()
    in_memory: str = ""
    replicated: str = ""
    replicates: bool = False

    @property
    def step_s(self) -> float | None:
        """Return the seconds of a step; None: not known yet."""
        return None if self.micro_batch_s is None else self.micro_batch_s * (self.window or 1)

    def to_json(self) -> dict[str, Any]:
        """Return the content for a heartbeat."""
        return asdict(self)


def parse_live_status(body: object) -> LiveStatus | None:
    """Return the status in a heartbeat; None if it holds none, as one of an older release."""
    if not isinstance(body, dict) or "written" not in body:
        return None
    return _parse(body, LiveStatus)


def times_in(body: object) -> AttemptTimes | None:
    """Return the times in a heartbeat, if it holds any."""
    return AttemptTimes.parse(body.get(TIMES)) if isinstance(body, dict) else None


def _parse(body: dict[Any, Any], kind: type[T]) -> T:
    types = _types(kind)  # type: ignore[arg-type] # every class has a hash
    values = {}
    for each in fields(kind):  # type: ignore[arg-type] # a dataclass
        value, fits = _value(body.get(each.name), types[each.name])
        if fits:
            values[each.name] = value
    return kind(**values)


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(value: Any, kind: Any) -> tuple[Any, bool]:
    """Return the value as a field of this type has it, and False if it is none."""
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        items = [_value(each, inner) for each in value[:MOST_ITEMS]] if type(value) is list else []
        return tuple(each for each, fits in items if fits), type(value) is list
    if arguments := get_args(kind):  # X | None
        return (None, True) if value is None else _value(value, arguments[0])
    if kind is float:
        is_number = type(value) in (int, float) and 0 <= value <= MOST_S
        return (float(value), True) if is_number else (None, False)
    if kind is int:
        return value, type(value) is int and 0 <= value < LARGEST
    if kind is str:
        return (value[:LONGEST], True) if type(value) is str else (None, False)
    if kind is bool:
        return value, type(value) is bool
    return (_parse(value, kind), True) if isinstance(value, dict) else (None, False)
