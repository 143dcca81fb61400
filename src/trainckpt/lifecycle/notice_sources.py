"""Who else may have to stop this attempt, besides signals and notice files: clocks and machines.

the wall time    by the option, or by Slurm's variable
Slurm            where no variable says when the job ends, rank 0 asks once
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from trainckpt.preemption import slurm
from trainckpt.preemption.wall_time import SLURM_VARIABLE, WallTime, process_start_s, wall_time_end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.lifecycle.options import Options
    from trainckpt.preemption.notice import NoticeSource
    from trainckpt.ranks.world import World

WALL_TIME_LEAD_S = 120.0  # where no grace is set: how long before its end a run is stopped


def further_sources(
    options: Options,
    grace_s: float | None,
    world: World,
    environment: Mapping[str, str] | None = None,
) -> list[NoticeSource]:
    """The sources of this rank, not started."""
    environment = os.environ if environment is None else environment
    return [
        *_wall_time(options.wall_time, grace_s, environment),
        *_job_end(grace_s, world, environment),
    ]


def lead_s(grace_s: float | None, whole_s: float) -> float:
    """How long before its end a job that has `whole_s` in all is stopped."""
    return grace_s or min(WALL_TIME_LEAD_S, whole_s / 4)


def _wall_time(
    option_s: float | None, grace_s: float | None, environment: Mapping[str, str]
) -> list[NoticeSource]:
    now_s, started_s = time.monotonic(), process_start_s()
    ends_s = wall_time_end(option_s, environment, time.time(), now_s, started_s)
    return [] if ends_s is None else [WallTime(ends_s, lead_s(grace_s, ends_s - started_s))]


def _job_end(
    grace_s: float | None, world: World, environment: Mapping[str, str]
) -> list[NoticeSource]:
    job = slurm.job_to_requeue(environment)
    if world.rank != 0 or job is None or environment.get(SLURM_VARIABLE):
        return []
    scontrol = slurm.Scontrol(job, environment)
    return [slurm.JobEnd(scontrol.show, lambda whole_s: lead_s(grace_s, whole_s))]
