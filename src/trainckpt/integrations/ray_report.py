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

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
            value = json.loads(file.read(MAX_BYTES))
        run, snapshot = value["run"], value["snapshot"]
        if not (isinstance(run, str) and isinstance(snapshot, str)):
            raise TypeError("run and snapshot are no texts")  # noqa: TRY301 - one refusal for all
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"this Ray checkpoint names no snapshot of trainckpt: {type(error).__name__}: {error}",
            hint="pass one that ckpt.report() made, from get_checkpoint() or result.checkpoint",
        ) from error
    return run, snapshot


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


def reported(run: str) -> frozenset[str]:
    """Return the full names of the run's snapshots that checkpoints kept by Ray name. Rank 0."""
    import ray.train
    from ray.train import CheckpointConsistencyMode

    snapshots = set()
    for one in ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED):
        with one.checkpoint.as_directory() as folder:
            if Path(folder, NAME).exists():  # the script may report others itself
                of_run, snapshot = read_pointer(Path(folder))
                snapshots |= {snapshot} if of_run == run else set()
    return frozenset(snapshots)
