"""Experiment trackers over a resume: their run goes on, without what lies past the snapshot.

    track      after the resume, with the script's writer or run, wherever the script made it:
                   first start     it is left as it is
                   resume          the snapshot's run of the tracker goes on, cut back to the
                                   snapshot's position, instead of the one that the script made
    snapshot   keeps the id of each run and the position in it

The attempt's record has the position at its beginning too: an attempt may die before its first
snapshot, and the next one begins where it began.

The n-th run of a kind goes on as the n-th of this kind. In a run directory that was copied or moved
the script's own run is left as it is: the other one belongs to the original. All calls are on the
training thread.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.csv_run import CsvRun
from trainckpt.attempt.log import logger
from trainckpt.attempt.mlflow_run import MLflowRun
from trainckpt.attempt.tensorboard_run import TensorBoardRun
from trainckpt.attempt.wandb_run import WandbRun
from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.snapshot import attempt_history
from trainckpt.state.adapters import tracked_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier

    _Kind: TypeAlias = type["TensorBoardRun | CsvRun | MLflowRun | WandbRun"]

FACT = "trackers"  # in the record of an attempt: name -> id and position at its beginning


class TrackedRuns:
    """The trackers of this rank.

    Attributes:
        begins_anew: Earlier attempts do not count: `resume="never"`.
    """

    def __init__(self, registry: Registry, tier: Tier, rank: int) -> None:
        self._registry, self._tier, self._rank = registry, tier, rank
        self._saved: dict[str, dict[str, Any]] = {}
        self.begins_anew = False

    def resumed(self, saved: Saved) -> None:
        """Take the positions of the snapshot that was applied."""
        if saved.is_own or self._rank == 0:  # else they are another rank's
            self._saved = tracked_run.positions(saved)

    def track(self, run: Any, record_writer: RecordWriter) -> Any:
        """Track a writer or run, and return the one to log to from here on.

        Args:
            run: A writer or run of a known kind.
            record_writer: Of this attempt.

        Raises:
            ConfigurationError: Its kind is not known, or it cannot be cut back.
        """
        for known in self._registry.runs.values():
            if known.run is run:
                return run
        kind = _kind_of(run)
        number = sum(name.startswith(f"{kind.name}.") for name in self._registry.runs)
        name, own = f"{kind.name}.{number}", record_writer.record
        records = {} if self.begins_anew else _read_records(self._tier)
        of_this = f"{self._tier.url} {self._rank} {name}"
        tracked = kind(run, place=self._tier.url, mark=sha256(of_this.encode()).hexdigest()[:12])
        before = self._saved.get(name) or self._begun_alike(name, own, records)
        if before is not None and before.get("place") != self._tier.url:
            logger.warning(
                "%s goes on where the script has it, and shows some steps again: the run directory "
                "was %s, and the tracker's run %s may belong to it",
                name,
                before.get("place"),
                before["id"],
            )
        else:
            _begin(tracked, name, before, own.attempt)
        self._registry.runs[name] = tracked
        try:
            position = tracked_run.position_of(tracked)
        except Exception as error:  # noqa: BLE001 - each tracker has errors of its own
            logger.warning("%s may show steps before the first snapshot again: %r", name, error)
        else:
            record_writer.set_fact(FACT, name, position)
        return tracked.run

    def _begun_alike(
        self, name: str, own: AttemptRecord, records: Mapping[int, AttemptRecord]
    ) -> dict[str, Any] | None:
        """Return the position at the beginning of the newest attempt that began where this does."""
        for number in sorted(records, reverse=True) if self._rank == 0 else ():
            record, told = records[number], records[number].facts.get(FACT)
            if number < own.attempt and isinstance(told, dict) and name in told:
                return dict(told[name]) if record.parent == own.parent else None
        return None


def _begin(tracked: Any, name: str, before: Mapping[str, Any] | None, attempt: int) -> None:
    """Go on where the tracker was before, if it was. A tracker's trouble ends no training."""
    try:
        if before is not None:
            tracked.go_on(before["id"], before["position"], attempt)
        elif isinstance(tracked, WandbRun):
            tracked.secure_earlier_rows()
    except Exception as error:  # noqa: BLE001 - each tracker has errors of its own
        logger.warning(
            "%s cannot go on in its run %s, and may show some steps again: %s",
            name,
            tracked.id if before is None else before["id"],
            str(error) or repr(error),
        )


def _read_records(tier: Tier) -> dict[int, AttemptRecord]:
    try:
        return attempt_history.read_attempts(tier)
    except TrainckptError as error:
        logger.warning("the trackers of earlier attempts are not known: %s", error.message)
        return {}


def _kind_of(run: Any) -> _Kind:
    package = type(run).__module__.partition(".")[0]
    kinds: tuple[_Kind, ...] = (TensorBoardRun, CsvRun, MLflowRun, WandbRun)
    for kind in kinds:
        if kind.takes(run):
            return kind
    raise ConfigurationError(
        f"{type(run).__qualname__} of {package} is no tracker that can be cut back",
        hint="pass the SummaryWriter of torch.utils.tensorboard, or the run of mlflow.start_run() "
        "or wandb.init(); for a file that the script appends to: ckpt.track_file(path); else: "
        "@ckpt.on_resume",
    )
