"""Lightning's loggers over a resume: the same version, and each step once.

setup     Lightning has made every logger's experiment, in a folder of a new version: each gets
          the version of the attempt before, which ModelCheckpoint names its folder after
resume    the experiments are tracked, which leads them back into the folder
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import TABLE, read_options
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
_WITH_VERSIONS = ("TensorBoardLogger", "CSVLogger", "WandbLogger")  # W&B's is the run's id


def keep_versions(
    trainer: Any, run: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> None:
    """Give the loggers the versions that they had in the newest attempt before this one.

    In a copied run directory they begin anew: the versions are those of the original.
    """
    with_versions = [one for one in trainer.loggers if is_a(one, *_WITH_VERSIONS)]
    is_new = read_options({name: options.get(name) for name in TABLE}).resume == "never"
    if not with_versions or is_new:
        return
    with suppress(TrainckptError):  # the Checkpointer meets it too, and raises it
        tier = open_run_tier(run)
        records = attempt_history.read_attempts(tier)
        facts = [records[number].facts.get(FACT) for number in sorted(records, reverse=True)]
        of_this = [one for one in facts if isinstance(one, dict) and one.get(PLACE) == tier.url]
        versions = [one[VERSIONS] for one in of_this if VERSIONS in one]
        for one, version in zip(with_versions, versions[0] if versions else [], strict=False):
            if is_a(one, "WandbLogger"):
                _keep_id(one, version)
            else:
                one._version = version


def _keep_id(wandb_logger: Any, run_id: str) -> None:
    """Let the logger begin anew with this id, if its run is an offline one of another id."""
    run = wandb_logger._experiment
    if run is not None and run.offline and run.id != run_id:
        discard(run)
        wandb_logger._wandb_init["id"] = wandb_logger._id = run_id
        wandb_logger._experiment = None  # Lightning makes it at the next use


def track(trainer: Any, ckpt: Checkpointer) -> None:
    """Track every logger of a known kind; the run has resumed."""
    if not trainer.is_global_zero:
        return
    assert ckpt._attempt is not None
    versions = [one.version for one in trainer.loggers if is_a(one, *_WITH_VERSIONS)]
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
