"""Track a `SummaryWriter` of TensorBoard: its directory goes on, without later events."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError
from trainckpt.state.adapters import tracked_run

_MARK = ".trainckpt-"  # in the name of an event file


class TensorBoardRun:
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
        """Return True for a run of this kind."""
        names = ("_get_file_writer", "filename_suffix")  # tensorboardX has no such suffix
        return type(run).__name__ == "SummaryWriter" and all(hasattr(run, name) for name in names)

    @property
    def id(self) -> str:
        """Return the directory of the files."""
        return str(Path(self.run.log_dir).absolute())

    def position(self, limit_s: float) -> dict[str, int]:
        """Return the length of each event file, once what was logged is in it."""
        self._flush.wait(limit_s)
        return {name: path.stat().st_size for name, path in self._files().items()}

    def go_on(self, directory: str, lengths: dict[str, int], attempt: int) -> None:
        """Log to that directory, and cut its event files back to these lengths."""
        own, then = self._open_files(), {Path(directory, name) for name in lengths}
        self.run.close()  # its next use opens a new file
        for path in own:
            if path not in then:  # a second attempt in one process goes on in its file
                path.unlink(missing_ok=True)
        leave_folder(self.id, directory)
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


def leave_folder(directory: str, better: str) -> None:
    """Remove the directory that this attempt made, if it is empty and not the one to go on in."""
    if directory != better:
        logger.info("logging goes on in %s", better)
        with suppress(OSError):
            Path(directory).rmdir()
