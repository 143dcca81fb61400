"""Files of Lightning's ModelCheckpoint that an attempt wrote after the snapshot it is gone on from.

What wrote them is trained again, and so are they: under the same names, as in the run that was
never cut off. Lightning gives a file that is there already another name, `last-v1.ckpt`, and the
older one would stay for good.

    written    each name is put into the attempt's record before the file is: with the number of
               micro-batches that a snapshot had to have to know of it
    resumed    names that the snapshot does not know of are its attempts' own: to be overwritten
    finished   what was not written again is named; nothing is ever deleted here

An attempt takes over the names of the one before. Not if it was told to begin elsewhere than at the
newest snapshot: the files of a branch that was left on purpose are kept.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TrainckptError
from trainckpt.integrations.lightning_needs import is_a
from trainckpt.lifecycle.places.place import in_proof
from trainckpt.lifecycle.run.launch import AT_VARIABLE
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.lifecycle.checkpointer import Checkpointer

FACT, NAMES = "lightning", "checkpoint_files"
MOST = 200  # names in a record, the newest; it is written anew with each of them


def redirect_in_proof(trainer: Any) -> None:
    """Let each run of a proof have its own folders, or names of files would differ between them."""
    for callback in trainer.callbacks:
        if is_a(callback, "ModelCheckpoint") and callback.dirpath:
            callback.dirpath = in_proof(str(callback.dirpath))


class CheckpointFiles:
    """The files of all ModelCheckpoints of a fit.

    Args:
        trainer: Whose.
        ckpt: Of the fit; it has resumed.
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
        # All ranks decide alike on a name: Lightning agrees on it in a collective.
        self._again = set(trainer.strategy.broadcast(unknown) if self._callbacks else ())

    def watch(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Answer in the place of each ModelCheckpoint whether a file exists."""
        for callback in self._callbacks:
            replace(callback, "file_exists", partial(self._exists, callback.file_exists))
        if self._is_first and self._callbacks:
            self._record()  # also none: names of a branch that was left end here

    def say_left(self) -> None:
        """Name files of earlier attempts that were not written again, at the end of the fit."""
        for name in sorted(self._again) if self._is_first else ():
            if Path(name).exists():
                logger.warning(
                    "%s is of an attempt that was cut off, and was not written again: it does not "
                    "belong to the run that was trained", name,
                )  # fmt: skip

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
        self._ckpt._attempt.log.note(FACT, NAMES, dict(self._names))


def _names_before(ckpt: Checkpointer) -> dict[str, int]:
    """What the newest attempt before this one knew of."""
    if ckpt.options.resume == "never" or os.environ.get(AT_VARIABLE):
        return {}
    assert ckpt._attempt is not None
    try:
        records = attempts.read_attempts(ckpt._tier)
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
