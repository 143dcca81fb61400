"""The cursor: a run's position, counted in trained data, not in fetched data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from trainckpt.errors import UnusableSnapshot


@dataclass(frozen=True)
class Cursor:
    """A run's position at a boundary.

    At epoch 1, step 12, micro 3, batches 7, twelve optimizer steps are complete, and three
    micro-batches of the next window and seven batches of epoch 1 are trained.

    Attributes:
        epoch: Epochs completed.
        step: Optimizer steps completed.
        micro: Micro-batches trained since the last step: 0 at a window's start.
        batches: Batches of the current epoch trained by this rank.
        micro_batches: Micro-batches trained by this rank since the run began.
        samples: Samples trained by this rank since the run began, padding included.
        evaluations: 0 in training; i at the entry of the i-th evaluation since the last training
            boundary. A resume from there repeats the evaluation, not the epoch.
    """

    epoch: int = 0
    step: int = 0
    micro: int = 0
    batches: int = 0
    micro_batches: int = 0
    samples: int = 0
    evaluations: int = 0

    def place(self) -> list[int]:
        """Return the counters equal on all ranks at one boundary, and different at any other."""
        return [self.epoch, self.step, self.micro, self.micro_batches, self.evaluations]

    def to_json(self) -> dict[str, int]:
        """Return a JSON object, every field by its name."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Cursor:
        """Parse a cursor; raise `UnusableSnapshot` for anything else."""
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or any(
            type(data.get(name)) is not int or not 0 <= data[name] < 2**63 for name in names
        ):
            raise UnusableSnapshot(f"not a cursor: {str(data)[:200]}")
        return cls(**{name: data[name] for name in names})

    def __str__(self) -> str:
        where = f"epoch {self.epoch} step {self.step} micro-batch {self.micro}"
        return f"{where}, evaluation {self.evaluations}" if self.evaluations else where
