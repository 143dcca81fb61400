"""Handle files of Lightning's ModelCheckpoint newer than the snapshot of a resume.

Their training is repeated, and so are the files: under the same names, as in an uninterrupted run.
Lightning would give a file another name if one exists, `last-v1.ckpt`, and the older file would
stay for good.

    before a write   rank 0 adds the name to the attempt's record, with the micro-batches a snapshot
                     needs to cover the file
    after a resume   names not covered by the snapshot may be overwritten
    at the end       files not written again are reported; nothing is ever deleted here

An attempt inherits the names of the previous one, unless it was directed to another snapshot than
the newest: the files of a branch left on purpose stay.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.launch import AT_VARIABLE
from trainckpt.attempt.log import logger
from trainckpt.errors import TrainckptError
from trainckpt.integrations.lightning_compat import is_a
from trainckpt.run_directory.run_url import in_proof
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.checkpointer import Checkpointer

FACT, NAMES = "lightning", "checkpoint_files"
MOST = 200  # newest names in a record; each new name rewrites the record


def redirect_in_proof(trainer: Any) -> None:
    """Give each run of a proof its own folders: else file names would differ between them."""
    for callback in trainer.callbacks:
        if is_a(callback, "ModelCheckpoint") and callback.dirpath:
            callback.dirpath = in_proof(str(callback.dirpath))


class CheckpointFiles:
    """The files of all ModelCheckpoints of a fit.

    Args:
        trainer: The Trainer.
        ckpt: The Checkpointer of the fit, resumed.
    """

    def __init__(self, trainer: Any, ckpt: Checkpointer) -> None:
        self._ckpt = ckpt
        self._callbacks = [c for c in trainer.callbacks if is_a(c, "ModelCheckpoint")]
        self._is_first = bool(trainer.is_global_zero)
        self._names: dict[str, int] = {}
        known = ckpt.cursor.micro_batches
        if self._is_first and self._callbacks:
            self._names = _names_before(ckpt)
        unknown = [name for name, at in self._names.items() if at > known]
        # All ranks must decide alike on a name: Lightning agrees on it in a collective.
        self._again = set(trainer.strategy.broadcast(unknown) if self._callbacks else ())

    def watch(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Replace `file_exists` of each ModelCheckpoint."""
        for callback in self._callbacks:
            replace(callback, "file_exists", partial(self._exists, callback.file_exists))
        if self._is_first and self._callbacks:
            self._record()  # even if empty: names of an abandoned branch end here

    def say_left(self) -> None:
        """Report files of earlier attempts not written again, at the end of the fit."""
        for name in sorted(self._again) if self._is_first else ():
            if Path(name).exists():
                logger.warning(
                    "%s is of an attempt that was cut off, and was not written again: it does not "
                    "belong to the run that was trained",
                    name,
                )

    def _exists(self, ask: Callable[[Any, Any], bool], path: Any, trainer: Any) -> bool:
        name = _absolute(path)
        if name in self._again:
            self._again.discard(name)
        elif ask(path, trainer):
            return True
        if self._is_first:  # it is written next
            self._names.pop(name, None)
            self._names[name] = self._ckpt.cursor.micro_batches + 1
            self._record()
        return False

    def _record(self) -> None:
        assert self._ckpt._attempt is not None
        for name in list(self._names)[:-MOST]:
            del self._names[name]
        self._ckpt._attempt.log.set_fact(FACT, NAMES, dict(self._names))


def _names_before(ckpt: Checkpointer) -> dict[str, int]:
    """Return the names in the record of the newest attempt before this one."""
    if ckpt.options.resume == "never" or os.environ.get(AT_VARIABLE):
        return {}
    assert ckpt._attempt is not None
    try:
        records = attempt_history.read_attempts(ckpt._tier)
    except TrainckptError as error:
        logger.warning("files of earlier attempts are not known: %s", error.message)
        return {}
    for number in sorted(records, reverse=True):
        told = records[number].facts.get(FACT)
        if number < ckpt._attempt.number and isinstance(told, dict) and NAMES in told:
            return {str(name): int(at) for name, at in dict(told[NAMES]).items()}
    return {}


def _absolute(path: Any) -> str:
    name = str(path)
    return name if "://" in name else str(Path(name).absolute())
