"""Track a CSVLogger of Lightning: the snapshot's file goes on, without later rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.tensorboard_run import leave_folder


class CsvRun:
    """A CSVLogger of Lightning: the rows of its file.

    Rows and not bytes: the logger writes the whole file anew when a column is added.
    """

    name = "csv"

    def __init__(self, run: Any, *, place: str, **_: Any) -> None:
        self.run, self.place = run, place

    @staticmethod
    def takes(run: Any) -> bool:
        """Return True for a run of this kind."""
        return type(run).__name__ == "CSVLogger" and hasattr(run, "experiment")

    @property
    def id(self) -> str:
        """Return the directory of the files."""
        return str(Path(self.run.experiment.log_dir).absolute())

    def position(self, _limit_s: float) -> int:
        """Return the number of lines in the file."""
        self.run.save()  # not beside the script: Lightning's own call, which drops what comes amid
        return len(self._lines())

    def go_on(self, directory: str, num_lines: int, attempt: int) -> None:
        """Log to the file of that directory, without the lines after the first `num_lines`."""
        writer = self.run.experiment
        writer.metrics.clear()  # a new writer would delete the file
        for name in (writer.NAME_METRICS_FILE, writer.NAME_HPARAMS_FILE):
            if directory != self.id:
                Path(self.id, name).unlink(missing_ok=True)
        leave_folder(self.id, directory)
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
