"""Log the start of an attempt: its resume point, and choices that the user cannot see. Rank 0 only.

`report.py` goes on from here: what turns out to be inexact once training has begun.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainckpt.attempt import launch
from trainckpt.attempt.log import logger
from trainckpt.attempt.options import misspelled_variables
from trainckpt.resume import script_changes
from trainckpt.resume.resume import still_alive

if TYPE_CHECKING:
    from trainckpt.attempt.options import DataWorld, Options
    from trainckpt.format.exactness import Exactness
    from trainckpt.resume.init_from import InitialWeights
    from trainckpt.resume.resume import ResumePoint
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import RunTier


def log_start(
    *,
    options: Options,
    tier: RunTier,
    registry: Registry,
    beginning: ResumePoint,
    exactness: Exactness,
    initial: InitialWeights | None,
    data_world: DataWorld | None,
) -> None:
    """Log the resume point, its exactness, and the choices that the user cannot see."""
    _log_resume_point(tier, beginning, exactness)
    if beginning.script is not None:
        script_changes.log(beginning.script.changes)
    _log_added_groups(registry)
    for sentence in misspelled_variables(os.environ):
        logger.warning(sentence)
    if initial is not None:
        logger.info("weights and buffers loaded from %s", initial.source)
    if excluded := sum(len(model.excluded) for model in registry.models):
        by = ", ".join(options.exclude)
        logger.info("exclude leaves %d tensors out of snapshots: %s", excluded, by)
    if data_world is not None:
        logger.debug("the data is divided over %s", data_world)
    if lost := launch.missing_supervisor(os.environ):
        logger.info(
            'running without a supervisor: %s (use "trainckpt run")',
            "; ".join(lost),
        )


def _log_resume_point(tier: RunTier, beginning: ResumePoint, exactness: Exactness) -> None:
    if alive := still_alive(tier, beginning.record.attempt):
        logger.warning(alive)
    for refused, reason in (beginning.refused or {}).items():
        logger.info("skipped snapshot %s: %s", refused, reason)
    start = f"{tier.url}, attempt {beginning.record.attempt}"
    if beginning.manifest is None:
        why = f" ({beginning.why_fresh})" if beginning.why_fresh else ""
        logger.info("%s: begins at step 0%s", start, why)
        return
    name, cursor = beginning.manifest.name, beginning.cursor
    known = exactness.line if exactness.reasons else "restored, compared after the first batch"
    logger.info("%s: resumed from %s, %s: %s", start, name, cursor, known)
    for reason in exactness.reasons:
        logger.info("not bitwise: %s", reason)


def _log_added_groups(registry: Registry) -> None:
    """Log the groups of optimizers that the snapshot holds and the script does not."""
    for optimizer in registry.optimizers:
        if optimizer.added:
            logger.debug(
                "%s got %d parameter groups from the snapshot. If the script adds them again "
                "before the first batch, the call is ignored",
                optimizer.name,
                optimizer.added,
            )
