"""Track an offline run of Weights & Biases: the run of the snapshot goes on, each row once.

An offline start of W&B makes a folder with one file, and `wandb sync` joins the folders of one run
id. W&B writes logged rows to the file every 15 seconds, so a snapshot keeps its length and the rows
that are not in it yet.

    resume     1. each file of this run id is cut back to its length in the snapshot, or renamed
                  if an attempt after the snapshot made it
               2. the rows of the snapshot are logged again, into the folder of this start

A file is cut by a new file of the same name: a kill in the middle loses nothing, and a service of
W&B that outlives its script writes to the old one.

W&B's folders may be lost or closed to this start. The run then goes on where the script logs, and
the files of the snapshot are left. If W&B refuses the id, rows go to a new run. If it opens none,
training goes on without rows, and each snapshot keeps the position of the one before.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

# The file of a run: a header, then records in blocks, in the log format of LevelDB.
_FILE_HEADER, _BLOCK, _FULL, _LAST = 7, 32768, 1, 4
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_CLOSED_WITHIN_S = 10.0
_MOST_ROWS = 1000  # logged between two looks at the file
_MOST_UNREAD = 10_000  # rows kept of a file that is gone


class WandbRun:
    """An offline run as `wandb.init` returns it.

    Attributes:
        run: The run, or the one of the snapshot's id that goes on instead.
        place: URL of the run directory.
    """

    name = "wandb"

    def __init__(self, run: Any, *, place: str, **_: Any) -> None:
        if not run.offline:
            raise ConfigurationError(
                f"run {run.id} of W&B logs to a server, which deletes no rows"
                if not run.disabled
                else "a disabled run of W&B logs nothing, so there is nothing to track",
                hint='use wandb.init(mode="offline"), or leave out track_run and name the run: '
                'wandb.init(id="...", resume="allow")',
            )
        self.run, self.place = run, place
        self._rows = _LoggedRows(run)
        self._without: tuple[str, dict[str, Any]] | None = None  # id and position, if none is open

    @staticmethod
    def takes(run: Any) -> bool:
        """Return True for a run of W&B."""
        return type(run).__module__.startswith("wandb.") and hasattr(run, "define_metric")

    @property
    def id(self) -> str:
        """Return the run's id."""
        return str(self.run.id) if self._without is None else self._without[0]

    def secure_earlier_rows(self) -> None:
        """Go on in another folder if rows were logged before: only a finished file has them all."""
        step, folder = self.run.step, _file_of(self.run).parent.parent
        if not step:
            return
        records = finish(self.run)
        before = {"folder": str(folder), "lengths": _lengths(folder, self.id), "rows": []}
        if self._open_again(self.id, folder, before | {"next": step}, records):
            self.run.log({}, step=step)  # no row: the next one is of this step

    def position(self, _limit_s: float) -> dict[str, Any]:
        """Return the lengths of the run's files, and the rows that are in none of them."""
        if self._without is not None:
            return self._without[1]
        rows, own = self._rows, _file_of(self.run)
        rows.forget_written()
        folder = own.parent.parent
        return {
            "folder": str(folder),
            "lengths": _lengths(folder, self.id) | {own.parent.name: rows.length},
            "rows": [row for _, row in rows.unwritten],
            "next": rows.next_step,
        }

    def go_on(self, run_id: str, position: Mapping[str, Any], attempt: int) -> None:
        """Go on in this run, without what was logged after this position."""
        folder, lengths = Path(position["folder"]), position["lengths"]
        own = _file_of(self.run)
        is_usable = _is_writable(folder)
        if not is_usable:
            logger.warning(
                "W&B's folder %s is closed to this start: run %s goes on in %s, and shows steps "
                "after the snapshot again; run wandb sync on both",
                folder,
                run_id,
                own.parent.parent,
            )
        there = folder if is_usable else own.parent.parent
        if self.id != run_id or own.parent.parent != there or self.run.step:
            is_new = own.parent.name not in lengths  # this start made it: nothing in it stays
            records = finish(self.run)
            aside = _set_aside(own.parent) if is_new else None
            is_open = self._open_again(run_id, there, position, records)
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True) if is_open else aside.rename(own.parent)
            if not is_open:
                return
            own = _file_of(self.run)
            logger.info("logging goes on in run %s of W&B", run_id)
        paths = [path for path in _files(folder, run_id) if path != own] if is_usable else []
        for path in paths:
            length = lengths.get(path.parent.name, 0)
            if path == paths[-1] or length != path.stat().st_size:
                _cut(path, length, attempt)
        for row in position["rows"]:
            step, data, ends = json.loads(row)
            self.run.log(data, step=step, commit=ends)
        if self._rows.next_step < position["next"]:
            self.run.log({}, step=position["next"])  # no row: the next one is of this step

    def _open_again(
        self, run_id: str, folder: Path, position: Mapping[str, Any], records: list[Any]
    ) -> bool:
        """Open a run with settings, config and metrics of the script's finished one.

        Args:
            run_id: Of the run to open.
            folder: Of W&B, where its folders are.
            position: That snapshots keep if no run can be opened.
            records: Of the script's run.

        Returns:
            False: it is another run, or none.
        """
        import wandb

        scripts = self.run
        how = {"config": dict(scripts.config), "settings": scripts.settings}
        try:
            self.run = wandb.init(id=run_id, dir=str(folder.parent), **how)
        except Exception as error:  # noqa: BLE001 - a tracker's trouble ends no training
            why = str(error) or repr(error)
        else:
            self._take_over(scripts, records)
            return True
        try:
            own = _file_of(scripts).parent.parent
            self.run = wandb.init(id=uuid4().hex[:8], dir=str(own.parent), **how)
        except Exception:  # noqa: BLE001 - as above
            logger.warning(
                "W&B opens no run any more, so this attempt logs no rows; the next one goes on in "
                "run %s: %s",
                run_id,
                why,
            )
            self._without = run_id, dict(position)
            with suppress(Exception):
                self.run = wandb.init(mode="disabled")
            scripts.log = _log_nothing if self.run is scripts else self.run.log
            return False
        self._take_over(scripts, records)
        logger.warning(
            "W&B opens run %s no more, so rows go to the new run %s, and steps may be in both: %s",
            run_id,
            self.id,
            why,
        )
        return False

    def _take_over(self, scripts: Any, records: list[Any]) -> None:
        """Give the run that was opened the metrics and the `log` of the script's."""
        for metric in [one.metric for one in records if _kind(one) == "metric"]:
            self.run.define_metric(**_arguments(metric))
        self._rows = _LoggedRows(self.run)
        scripts.log = self.run.log  # a script that logs to its own run reaches the one that goes on


def _log_nothing(*_: Any, **__: Any) -> None:
    """Stand for the `log` of a finished run, which raises."""


class _LoggedRows:
    """The rows logged to a run, as far as they are not in its file.

    Attributes:
        unwritten: Step, and arguments of `run.log` as JSON, of each call since the last row in the
            file.
        next_step: Of the next row.
        length: Of the file, in bytes, as far as its records are whole.
    """

    def __init__(self, run: Any) -> None:
        import wandb

        self.unwritten: list[tuple[int, str]] = []
        self.next_step = int(run.step)
        self.length = _FILE_HEADER
        self._warned = False
        self._path = _file_of(run)
        self._log = run.log
        run.log = self.log
        if wandb.run is run:
            wandb.log = self.log

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None, **how: Any
    ) -> None:
        """Log as `run.log` does, and remember it."""
        self._log(data, step=step, commit=commit, **how)
        try:
            self._remember(data, step, commit)
        except Exception as error:  # noqa: BLE001 - W&B has the row; ours ends no training
            self._warn(error)

    def _remember(self, data: dict[str, Any], step: int | None, commit: bool | None) -> None:
        of_step = self.next_step if step is None else int(step)
        if of_step < self.next_step:
            return  # W&B drops it, and warns
        ends = step is None if commit is None else commit
        self.next_step = of_step + 1 if ends else of_step
        values = {"_timestamp": time.time(), **_plain(data)}
        self.unwritten.append((of_step, json.dumps([of_step, values, ends])))
        if len(self.unwritten) % _MOST_ROWS == 0:
            self.forget_written()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("a resume may lack rows of W&B's %s: %r", self._path, error)

    def forget_written(self) -> None:
        """Drop the rows that the file has. W&B writes them in the order of their steps.

        Of a file that cannot be read, the last rows are kept: more would fill every snapshot.
        """
        try:
            self._read_on()
        except Exception as error:  # noqa: BLE001 - W&B's file, whatever it has become
            self._warn(error)
            del self.unwritten[:-_MOST_UNREAD]

    def _read_on(self) -> None:
        last = -1
        for end, content in read_records(self._path, self.length):
            record = _parsed(content)
            if _kind(record) == "history":
                last = record.history.step.num
            self.length = end
        self.unwritten = [(step, row) for step, row in self.unwritten if step > last]


def discard(run: Any) -> None:
    """Finish a run that this start has made, and delete its folder."""
    finish(run)
    shutil.rmtree(_file_of(run).parent, ignore_errors=True)


def finish(run: Any) -> list[Any]:
    """Finish a run, and return its records once the file has all: W&B closes it a little later."""
    run.finish()
    path, deadline = _file_of(run), time.monotonic() + _CLOSED_WITHIN_S
    while True:
        try:
            records = [_parsed(content) for _, content in read_records(path)]
        except OSError as error:
            logger.warning("the rows of W&B's %s are lost: %s", path, error.strerror)
            return []
        if any(_kind(record) == "exit" for record in records):
            return records
        if time.monotonic() > deadline:
            logger.warning("%s may lack rows: W&B has not closed it", path)
            return records
        time.sleep(0.01)


def read_records(path: Path, start: int = _FILE_HEADER) -> Iterator[tuple[int, bytes]]:
    """Yield end and content of each whole record of a `.wandb` file, from one that begins there."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    at, parts = 0, []
    while True:
        room = _BLOCK - (start + at) % _BLOCK
        if room < _CHUNK.size:  # a block ends with less than a chunk's head
            at += room
            continue
        if at + _CHUNK.size > len(data):
            return
        checksum, length, kind = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        part = data[at : at + length]
        if len(part) < length or zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            return
        at += length
        parts.append(part)
        if kind in (_FULL, _LAST):
            yield start + at, b"".join(parts)
            parts = []


def _parsed(content: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    return messages.Record.FromString(content)


def _kind(record: Any) -> str:
    return str(record.WhichOneof("record_type"))


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and texts of a row; images and tables are files, and left out."""
    found: dict[str, Any] = {}
    for name, logged in data.items():
        if type(logged) in (float, int):
            found[name] = logged
            continue
        is_scalar = getattr(logged, "ndim", None) == 0 and hasattr(logged, "item")
        value = logged.item() if is_scalar else logged  # of torch and numpy
        if isinstance(value, Mapping):
            found[name] = _plain(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[name] = value
        elif isinstance(value, (list, tuple)) and all(type(v) in (int, float, str) for v in value):
            found[name] = list(value)
    return found


def _file_of(run: Any) -> Path:
    return Path(run.settings.sync_file).absolute()


def _files(folder: Path, run_id: str) -> list[Path]:
    """Return the files of a run, one for each start."""
    return sorted(folder.glob(f"offline-run-*/run-{glob.escape(run_id)}.wandb"))


def _lengths(folder: Path, run_id: str) -> dict[str, int]:
    return {path.parent.name: path.stat().st_size for path in _files(folder, run_id)}


def _is_writable(folder: Path) -> bool:
    """Return True if W&B can make folders there; else it would log to a temporary place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _set_aside(folder: Path) -> Path | None:
    """Rename a folder so that `wandb sync` leaves it; return the new name. None: it is gone."""
    with suppress(OSError):
        return folder.rename(folder.with_name(f"left-{folder.name}"))
    return None


def _cut(path: Path, length: int, attempt: int) -> None:
    """Cut a file back, or rename it if nothing of it stays. `wandb sync` reads only `.wandb`.

    The newest is made anew also where it has this length: its writer may not have ended yet.
    """
    now = path.stat().st_size
    aside = path.with_name(f"{path.name}.after-{attempt}")
    if length <= _FILE_HEADER:
        path.rename(aside)
    else:
        if now < length:
            logger.warning("%s has %d bytes, and had %d", path, now, length)
        if now > length:
            aside.unlink(missing_ok=True)  # of a resume that was killed here
            os.link(path, aside)
        shortened = path.with_name(f"{path.name}.cut")
        with path.open("rb") as source:
            shortened.write_bytes(source.read(length))
        shutil.copymode(path, shortened)
        shortened.replace(path)
    if now > length:
        logger.info("%s is cut back to the snapshot; %s is the whole file", path, aside.name)


def _arguments(metric: Any) -> dict[str, Any]:
    """Return the arguments of the `define_metric` that made this record."""
    kinds = [field.name for field, value in metric.summary.ListFields() if value is True]
    return {
        "name": metric.name or metric.glob_name,
        "step_metric": metric.step_metric or None,
        "step_sync": metric.options.step_sync or None,
        "hidden": metric.options.hidden or None,
        "summary": ",".join(kinds) or None,
    }
