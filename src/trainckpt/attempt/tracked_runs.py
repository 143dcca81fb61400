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

import os
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.mlflow_run import MLflowRun
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

    _Kind: TypeAlias = type["_TensorBoard | _Csv | MLflowRun | WandbRun"]

_MARK = ".trainckpt-"  # in the name of an event file
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
    kinds: tuple[_Kind, ...] = (_TensorBoard, _Csv, MLflowRun, WandbRun)
    for kind in kinds:
        if kind.takes(run):
            return kind
    raise ConfigurationError(
        f"{type(run).__qualname__} of {package} is no tracker that can be cut back",
        hint="pass the SummaryWriter of torch.utils.tensorboard, or the run of mlflow.start_run() "
        "or wandb.init(); for a file that the script appends to: ckpt.track_file(path); else: "
        "@ckpt.on_resume",
    )


class _TensorBoard:
    """A `SummaryWriter` of torch: the event files of its directory, each cut back to its length.

    What is cut off is kept beside its file, under a name that TensorBoard does not read. Files of
    other writers are left alone, in the same process too: the names of those that the writer makes
    from here on end with a mark of the run directory, the rank and the writer's number. What this
    attempt wrote before the resume is dropped: an earlier attempt has written it too.
    """

    name = "tensorboard"

    def __init__(self, run: Any, *, place: str, mark: str) -> None:
        self.run, self.place = run, place
        self._mark = f"{_MARK}{mark}"
        if self._mark not in run.filename_suffix:
            run.filename_suffix += self._mark
        if "://" in str(run.log_dir):
            raise ConfigurationError(
                f"the event files in {run.log_dir} cannot be cut back: they are in a store",
                hint="log to a directory, or pass SummaryWriter(..., purge_step=ckpt.cursor.step)",
            )
        self._flush = tracked_run.Flush(run.flush)
        self._unmarked = {os.path.relpath(path, self.id) for path in self._open_files()}

    @staticmethod
    def takes(run: Any) -> bool:
        names = ("_get_file_writer", "filename_suffix")  # tensorboardX has no such suffix
        return type(run).__name__ == "SummaryWriter" and all(hasattr(run, name) for name in names)

    @property
    def id(self) -> str:
        return str(Path(self.run.log_dir).absolute())

    def position(self, limit_s: float) -> dict[str, int]:
        self._flush.wait(limit_s)
        return {name: path.stat().st_size for name, path in self._files().items()}

    def go_on(self, directory: str, lengths: dict[str, int], attempt: int) -> None:
        own, then = self._open_files(), {Path(directory, name) for name in lengths}
        self.run.close()  # its next use opens a new file
        for path in own:
            if path not in then:  # a second attempt in one process goes on in its file
                path.unlink(missing_ok=True)
        _leave(self.id, directory)
        self.run.log_dir = directory
        self._unmarked = set(lengths)
        if not any(_MARK in name for name in lengths):
            self._warn_of_unmarked()
        found = {name: (path, path.stat().st_size) for name, path in self._files().items()}
        for name, (path, length) in found.items():
            if length > lengths.get(name, 0):
                _cut_event_file(path, lengths.get(name, 0), attempt)
        for name, length in lengths.items():
            now = found[name][1] if name in found else 0
            if now < length:
                logger.warning("%s/%s has %d bytes, and had %d", directory, name, now, length)

    def _warn_of_unmarked(self) -> None:
        """Name files without a mark, which earlier releases gave none to."""
        names = {path.name for path in Path(self.id).glob("*tfevents*") if _MARK not in path.name}
        if others := sorted(names - self._unmarked):
            logger.warning(
                "%s in %s may be another writer's, and stays; if an attempt under an earlier "
                "trainckpt has written it, move it away: its steps are logged again",
                ", ".join(others),
                self.id,
            )

    def _open_files(self) -> list[Path]:
        writers = (self.run.all_writers or {}).values()
        return [Path(writer.event_writer._file_name).absolute() for writer in writers]

    def _files(self) -> dict[str, Path]:
        """Return the event files of this run, also those of `add_scalars` one folder below."""
        folder = Path(self.id)
        paths = [*folder.glob("*tfevents*"), *folder.glob("*/*tfevents*")]
        names = {str(path.relative_to(folder)): path for path in paths}
        return {
            name: path
            for name, path in names.items()
            if name in self._unmarked or path.name.endswith(self._mark)
        }


def _cut_event_file(path: Path, length: int, attempt: int) -> None:
    aside = path.with_name(path.name.replace("tfevents", f"after-{attempt}"))
    if length == 0:
        path.rename(aside)
    else:
        with path.open("rb") as source, aside.open("wb") as copy:
            source.seek(length)
            shutil.copyfileobj(source, copy)
        os.truncate(path, length)
    logger.info("%s is cut back to the snapshot; the rest is in %s", path, aside.name)


class _Csv:
    """A CSVLogger of Lightning: the rows of its file.

    Rows and not bytes: the logger writes the whole file anew when a column is added.
    """

    name = "csv"

    def __init__(self, run: Any, *, place: str, **_: Any) -> None:
        self.run, self.place = run, place

    @staticmethod
    def takes(run: Any) -> bool:
        return type(run).__name__ == "CSVLogger" and hasattr(run, "experiment")

    @property
    def id(self) -> str:
        return str(Path(self.run.experiment.log_dir).absolute())

    def position(self, _limit_s: float) -> int:
        self.run.save()  # not beside the script: Lightning's own call, which drops what comes amid
        return len(self._lines())

    def go_on(self, directory: str, num_lines: int, attempt: int) -> None:
        writer = self.run.experiment
        writer.metrics.clear()  # a new writer would delete the file
        for name in (writer.NAME_METRICS_FILE, writer.NAME_HPARAMS_FILE):
            if directory != self.id:
                Path(self.id, name).unlink(missing_ok=True)
        _leave(self.id, directory)
        writer.log_dir = directory
        writer.metrics_file_path = str(Path(directory, writer.NAME_METRICS_FILE))
        lines, path = self._lines(), Path(writer.metrics_file_path)
        writer.metrics_keys = lines[0].strip().split(",") if lines and num_lines else []
        if len(lines) < num_lines:
            logger.warning("%s has lost rows logged before the snapshot", path)
        if len(lines) > num_lines:
            path.with_name(f"{path.name}.after-{attempt}").write_text("".join(lines[num_lines:]))
            kept = path.with_name(f"{path.name}.kept")  # a kill amid this loses no row
            kept.write_text("".join(lines[:num_lines]))
            kept.replace(path)
            if not num_lines:
                path.unlink()  # the logger writes the header of a new file

    def _lines(self) -> list[str]:
        path = Path(self.run.experiment.metrics_file_path)
        return path.read_text().splitlines(keepends=True) if path.exists() else []


def _leave(directory: str, better: str) -> None:
    """Remove the directory that this attempt made, if it is empty and not the one to go on in."""
    if directory != better:
        logger.info("logging goes on in %s", better)
        with suppress(OSError):
            Path(directory).rmdir()
