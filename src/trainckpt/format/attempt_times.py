"""Parse and dump where one attempt's time went, as its record holds it under `times`.

One clock: rank 0's monotonic clock, in seconds since the launch of its processes. `began` is that
moment by the wall clock, read once. The phases follow each other without gaps:

    0           the processes are launched; a snapshot is read and applied meanwhile (`restore_s`)
    trains_at   the first boundary is over: training, with waits for saves (`save_s`) and
                evaluations (`evaluation_s`) in between
    leaves_at   the boundary at which the attempt ends: the final save, the other ranks, uploads
    seconds     the last that is known of it

An attempt that was killed lacks the later ones. A reader skips values that cannot be, since records
may be written by other releases or by hand.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trainckpt.format.duration import MOST_S

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMES = "times"  # key of an attempt's record
LARGEST = 2**53  # count of steps or bytes that JSON keeps exact
NAME_LENGTH = 100


@dataclass(frozen=True, order=True)
class TrainedCount:
    """Training up to one boundary, counted from the beginning of the run."""

    micro_batches: int = 0
    steps: int = 0


NOTHING = TrainedCount()


@dataclass(frozen=True)
class CommitMark:
    """Boundary of the newest snapshot that an attempt committed.

    Attributes:
        at: The boundary.
        training_s: Seconds of training that the attempt had spent there.
    """

    at: TrainedCount
    training_s: float


@dataclass(frozen=True, kw_only=True)
class AttemptTimes:
    """One attempt's time, in seconds since its launch.

    Attributes:
        began: The launch, in seconds since the Unix epoch.
        seconds: The last moment that is known.
        trains_at, leaves_at: Beginnings of training and of leaving; None: it did not come so far.
        restore_s: Reading and applying the snapshot, before `trains_at`.
        restored_bytes: Tier -> bytes that rank 0's host read from it.
        save_s, evaluation_s: Between `trains_at` and `leaves_at`.
        saves: Number of waits in `save_s`.
        begun, reached: What was trained where the attempt began, and at its last boundary.
        committed: None: it committed nothing.
    """

    began: float
    seconds: float
    trains_at: float | None = None
    leaves_at: float | None = None
    restore_s: float = 0.0
    restored_bytes: Mapping[str, int] = field(default_factory=dict)
    save_s: float = 0.0
    saves: int = 0
    evaluation_s: float = 0.0
    begun: TrainedCount = NOTHING
    reached: TrainedCount = NOTHING
    committed: CommitMark | None = None

    @property
    def training_s(self) -> float:
        """Return the seconds between `trains_at` and `leaves_at` that were training."""
        if self.trains_at is None:
            return 0.0
        until_s = self.seconds if self.leaves_at is None else self.leaves_at
        return max(until_s - self.trains_at - self.save_s - self.evaluation_s, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the value for the record, rounded to milliseconds."""
        body: dict[str, Any] = _rounded(asdict(self))
        return body

    @classmethod
    def parse(cls, body: object) -> AttemptTimes | None:
        """Return the times in a record's value; None if it does not tell the attempt's duration.

        Values that cannot be are left out, or cut to what is possible.
        """
        if not isinstance(body, dict):
            return None
        began, seconds = seconds_of(body.get("began")), seconds_of(body.get("seconds"))
        if began is None or seconds is None:
            return None
        trains_at = seconds_of(body.get("trains_at"), seconds)
        leaves_at = seconds_of(body.get("leaves_at"), seconds)
        if leaves_at is not None:
            leaves_at = max(leaves_at, trains_at or 0.0)
        until_s = seconds if leaves_at is None else leaves_at
        spent_s = until_s - trains_at if trains_at is not None else 0.0
        save_s = min(seconds_of(body.get("save_s")) or 0.0, spent_s)
        evaluation_s = min(seconds_of(body.get("evaluation_s")) or 0.0, spent_s - save_s)
        before_s = seconds if trains_at is None else trains_at
        begun, reached = _trained(body.get("begun")), _trained(body.get("reached"))
        return cls(
            began=began,
            seconds=seconds,
            trains_at=trains_at,
            leaves_at=leaves_at,
            restore_s=min(seconds_of(body.get("restore_s")) or 0.0, before_s),
            restored_bytes=_bytes_by_tier(body.get("restored_bytes")),
            save_s=save_s,
            saves=count_of(body.get("saves")),
            evaluation_s=evaluation_s,
            begun=begun,
            reached=TrainedCount(
                max(begun.micro_batches, reached.micro_batches), max(begun.steps, reached.steps)
            ),
            committed=_commit(body.get("committed")),
        )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def seconds_of(value: object, most: float = MOST_S) -> float | None:
    """Return seconds from 0 to `most`, cut to it; None for anything else.

    It is compared before it is converted: JSON has integers that no float can hold.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(min(value, most))


def count_of(value: object) -> int:
    """Return a count that JSON keeps exact; 0 for anything else."""
    return value if type(value) is int and 0 <= value < LARGEST else 0


def _trained(value: object) -> TrainedCount:
    if not isinstance(value, dict):
        return TrainedCount()
    return TrainedCount(count_of(value.get("micro_batches")), count_of(value.get("steps")))


def _bytes_by_tier(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        return {}
    return {str(name)[:NAME_LENGTH]: count_of(num_bytes) for name, num_bytes in value.items()}


def _commit(value: object) -> CommitMark | None:
    if not isinstance(value, dict):
        return None
    training_s = seconds_of(value.get("training_s"))
    return None if training_s is None else CommitMark(_trained(value.get("at")), training_s)
