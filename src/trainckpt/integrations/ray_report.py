"""Checkpoints for Ray that name a snapshot, instead of holding it.

    trainckpt.json   {"run": URL of the run, "snapshot": full name}

Ray copies, keeps and deletes this one file as it does any checkpoint. The bytes stay in the run,
where a resume finds them, and are written once.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NAME = "trainckpt.json"
MAX_BYTES = 64 * 1024


@contextmanager
def pointer_to(run: str, snapshot: str) -> Iterator[Any]:
    """Yield a Ray checkpoint that names a snapshot; its folder is deleted afterwards."""
    from ray.train import Checkpoint

    with tempfile.TemporaryDirectory(prefix="trainckpt-") as folder:
        text = json.dumps({"run": run, "snapshot": snapshot})
        Path(folder, NAME).write_text(text + "\n", encoding="utf-8")
        yield Checkpoint.from_directory(folder)


def read_pointer(folder: Path) -> tuple[str, str]:
    """Return the run and the full name of the snapshot that a checkpoint's folder names.

    Raises:
        ConfigurationError: It names none.
    """
    try:
        with (folder / NAME).open("rb") as file:
            return _parsed(file.read(MAX_BYTES))
    except OSError as error:
        raise _names_none(error) from error


def _parsed(data: bytes) -> tuple[str, str]:
    try:
        value = json.loads(data)
        run, snapshot = value["run"], value["snapshot"]
        if not (isinstance(run, str) and isinstance(snapshot, str)):
            raise TypeError("run and snapshot are no texts")  # noqa: TRY301 - one refusal for all
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _names_none(error) from error
    return run, snapshot


def _names_none(error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"this Ray checkpoint names no snapshot of trainckpt: {type(error).__name__}: {error}",
        hint="pass one that ckpt.report() made, from get_checkpoint() or result.checkpoint",
    )


def snapshot_of(checkpoint: Any) -> str:
    """Return `RUN@SNAPSHOT` for a checkpoint made by `Checkpointer.report`.

    `trainckpt.load` takes it, the option `init_from`, and the commands that show and export.

    Args:
        checkpoint: A `ray.train.Checkpoint`, of `get_checkpoint()` or `result.checkpoint`.

    Raises:
        ConfigurationError: The checkpoint was made otherwise.
    """
    with checkpoint.as_directory() as folder:
        return "@".join(read_pointer(Path(folder)))


class ReportedSnapshots:
    """The run's snapshots that checkpoints kept by Ray name. Rank 0.

    Only the file of a checkpoint is read, and once: a script's own checkpoint may have gigabytes.

    Args:
        run: URL of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._named: dict[str, str | None] = {}  # by path; None: of another run, or the script's
        self._problem = ""

    def read(self, checkpoints: Iterable[Any]) -> frozenset[str] | None:
        """Return the full names of the snapshots; None, and a warning, if a checkpoint is damaged.

        Args:
            checkpoints: Each a `ray.train.Checkpoint`.
        """
        named: dict[str, str | None] = {}
        for checkpoint in checkpoints:
            path = checkpoint.path
            try:
                named[path] = self._named[path] if path in self._named else self._read(checkpoint)
            except Exception as error:  # noqa: BLE001 - a file system may raise any
                self._warn(f"{path}: {getattr(error, 'message', None) or error}")
                self._named |= named
                return None
        self._named = named  # without those that Ray has deleted
        return frozenset(filter(None, named.values()))

    def _read(self, checkpoint: Any) -> str | None:
        files, path = checkpoint.filesystem, f"{checkpoint.path}/{NAME}"
        folder, pointer = files.get_file_info([checkpoint.path, path])
        if not pointer.is_file:
            if folder.type.name == "NotFound":
                raise FileNotFoundError("it is missing")
            return None  # one that the script has reported itself
        with files.open_input_stream(path) as file:
            run, snapshot = _parsed(file.read(MAX_BYTES))
        return snapshot if run == self._run else None

    def _warn(self, problem: str) -> None:
        if problem != self._problem:  # it is read again at each report
            self._problem = problem
            logger.warning(
                "a checkpoint that Ray keeps cannot be read, so the snapshots that its checkpoints "
                "named before are not pruned: %s",
                problem,
            )
