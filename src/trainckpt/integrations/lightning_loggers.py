"""Lightning's loggers over a resume: the same version, and each step once.

setup     Lightning has made every logger's experiment, in a folder of a new version: each gets
          the version of the attempt before, which ModelCheckpoint names its folder after
resume    the experiments are tracked, which leads them back into the folder
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import TABLE, may_be_option, read_options
from trainckpt.attempt.wandb_run import discard
from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.integrations.lightning_compat import is_a
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from trainckpt.checkpointer import Checkpointer

FACT, VERSIONS, PLACE = "lightning", "versions", "place"  # in the record of an attempt
_IN_FOLDERS = ("TensorBoardLogger", "CSVLogger")
_WITH_VERSIONS = (*_IN_FOLDERS, "WandbLogger")  # W&B's is the run's id


def keep_versions(
    trainer: Any, run: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> None:
    """Give the loggers the versions that they had in the newest attempt before this one.

    The n-th logger of a class gets the version of the n-th of this class.
    In a copied run directory they begin anew: the versions are those of the original.
    """
    with_versions = [one for one in trainer.loggers if is_a(one, *_WITH_VERSIONS)]
    given = {name: options.get(name) for name in TABLE if may_be_option(name, options.get(name))}
    if not with_versions or read_options(given).resume == "never":
        return
    with suppress(TrainckptError):  # the Checkpointer meets it too, and raises it
        tier = open_run_tier(run)
        records = attempt_history.read_attempts(tier)
        facts = [records[number].facts.get(FACT) for number in sorted(records, reverse=True)]
        known = [one for one in facts if isinstance(one, dict) and VERSIONS in one]
        of_this = [one for one in known if one.get(PLACE, tier.url) == tier.url]
        versions = _by_class(of_this[0], with_versions) if of_this else {}
        for one in with_versions:
            of_class = versions.get(_class_of(one))
            version = of_class.pop(0) if of_class else None
            if is_a(one, "WandbLogger"):
                if isinstance(version, str):
                    _keep_id(one, version)
            elif version is not None:
                one._version = version


def _class_of(logger_: Any) -> str:
    return next(name for name in _WITH_VERSIONS if is_a(logger_, name))


def _by_class(fact: Mapping[str, Any], loggers: list[Any]) -> dict[str, list[Any]]:
    """Return class -> versions, in the loggers' order.

    Earlier releases wrote versions without classes, the first of them none of W&B and no place:
    the loggers of the script say the classes.
    """
    pairs = fact[VERSIONS]
    if not all(isinstance(pair, list) for pair in pairs):
        names = _WITH_VERSIONS if PLACE in fact else _IN_FOLDERS
        classes = [_class_of(one) for one in loggers if is_a(one, *names)]
        pairs = list(zip(classes, pairs, strict=False))
    versions: dict[str, list[Any]] = {}
    for name, version in pairs:
        versions.setdefault(name, []).append(version)
    return versions


def _keep_id(wandb_logger: Any, run_id: str) -> None:
    """Let the logger begin anew with this id, if it has made an offline run of another id."""
    run = wandb_logger._experiment
    if run is not None and run.offline and run.id != run_id and _has_made(wandb_logger, run):
        discard(run)
        wandb_logger._wandb_init["id"] = wandb_logger._id = run_id
        wandb_logger._experiment = None  # Lightning makes it at the next use


def _has_made(wandb_logger: Any, run: Any) -> bool:
    """Return False for a run of the script's: it has other settings, or rows."""
    asked, settings = wandb_logger._wandb_init, run.settings
    names = {"resume": settings.resume, "project": settings.project, "dir": settings.root_dir}
    return run.step == 0 and all(asked.get(name) == is_ for name, is_ in names.items())


def track(trainer: Any, ckpt: Checkpointer) -> None:
    """Track every logger of a known kind; the run has resumed."""
    if not trainer.is_global_zero:
        return
    assert ckpt._attempt is not None
    with_versions = [one for one in trainer.loggers if is_a(one, *_WITH_VERSIONS)]
    versions = [[_class_of(one), one.version] for one in with_versions]
    facts = {VERSIONS: versions, PLACE: ckpt._context.tier.url}
    ckpt._attempt.record_writer.set_facts({FACT: facts})
    for one in trainer.loggers:
        try:
            if is_a(one, "TensorBoardLogger"):
                ckpt.track_run(one.experiment)
            elif is_a(one, "CSVLogger"):
                ckpt.track_run(one)
            elif is_a(one, "MLFlowLogger"):
                info = ckpt.track_run(one.experiment.get_run(one.run_id)).info
                one._run_id, one._experiment_id = info.run_id, info.experiment_id
            elif is_a(one, "WandbLogger") and not one.experiment.disabled:
                one._experiment = ckpt.track_run(one.experiment)
        except ConfigurationError as error:
            logger.warning("%s repeats steps after a resume: %s", type(one).__name__, error.message)
