"""Choose the notice sources of this rank, signals aside, and log the notices of all.

    the run          notice files in its directory, or objects in its store
    the wall time    by the option, or by Slurm's variable
    Slurm            where no variable holds the job's end, rank 0 asks
    a lost parent    `trainckpt run` or torchrun was killed: `lost_parent`

`ProgressReporter` is polled like a source, and never has a notice.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.launch import ACCELERATE, TORCHRUN, kind_of_launch
from trainckpt.attempt.log import logger
from trainckpt.attempt.options import AUTO
from trainckpt.attempt.status_files import (
    SUPERVISOR_VARIABLE,
    RankProgress,
    RestoreAnnouncement,
    launch_folder,
    read_restore_announcement,
    write_status,
)
from trainckpt.errors import ConfigurationError
from trainckpt.format import names
from trainckpt.notice import OF_MACHINE, Notice, PolledSource
from trainckpt.preemption import gpu_health, slurm, spot
from trainckpt.preemption.notice_file import NoticeFiles
from trainckpt.preemption.polling import PollingSource
from trainckpt.preemption.stored_notices import StoredNotices
from trainckpt.preemption.wall_time import SLURM_VARIABLE, WallTime, process_start_s, wall_time_end
from trainckpt.stop.lost_parent import AgentLost, SupervisorLost
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.notice import NoticeSource
    from trainckpt.ranks.world import World
    from trainckpt.save.estimates import Timings
    from trainckpt.storage.base import RunTier


STOPPING = "stopping at the next boundary shared by all ranks"
LATE = "training is already finished and saved"


class LoggedNoticeSource:
    """Pass every call on to `source` and log each reason once. Watcher thread.

    Attributes:
        most_urgent: The most urgent notice: its reason, and the end of its grace period on the
            monotonic clock (inf: no time limit given). None: no notice yet.
        is_late: Training has ended, so no boundary follows: later notices are logged as late.
    """

    def __init__(
        self, source: NoticeSource, on_notice: Callable[[], object] = lambda: None
    ) -> None:
        self._source = source
        self._on_notice = on_notice
        self._logged: set[str] = set()
        self.most_urgent: tuple[str, float] | None = None
        self.is_late = False
        self.start, self.fileno, self.stop = source.start, source.fileno, source.stop

    def poll(self) -> Sequence[Notice]:
        """Return the notices since the last call, and log each new reason."""
        notices = self._source.poll()
        for notice in notices:
            left_s = math.inf if notice.seconds_left is None else notice.seconds_left
            ends_s = time.monotonic() + left_s
            if self.most_urgent is None or ends_s < self.most_urgent[1]:
                self.most_urgent = notice.reason, ends_s
            if notice.reason not in self._logged:
                self._logged.add(notice.reason)
                self._on_notice()
                logger.info("%s: %s", notice.reason, LATE if self.is_late else STOPPING)
        return notices

    @property
    def says_machine_goes(self) -> bool:
        """Return True if the source reported this machine as leaving or unhealthy."""
        return any(reason.startswith(OF_MACHINE) for reason in tuple(self._logged))

    def forget(self) -> None:
        """Forget all notices after a stop is undone: the same reason is logged again. Any
        thread."""
        self._logged, self.most_urgent = set(), None


class ProgressReporter(PolledSource):
    """Report this rank's progress to its supervisor at each poll."""

    def __init__(self, timings: Timings, rank: int) -> None:
        folder = launch_folder()
        self._path = folder / f"pace{rank}.json" if folder else None
        self._timings = timings

    def poll(self) -> list[Notice]:
        """Report the progress; return no notices."""
        since_s = self._timings.since_s(time.monotonic())
        if self._path is not None and since_s is not None:
            progress = RankProgress(since_s, self._timings.micro_batch_s, self._timings.save_s)
            with contextlib.suppress(OSError):
                write_status(self._path, progress)
        return []


def run_source(
    tier: RunTier, attempt: int, say: Callable[[str], object], *, is_first_of_host: bool
) -> NoticeSource | None:
    """Return the source of notices in the run; None: another rank of this host polls its store."""
    if isinstance(tier, LocalTier):
        return NoticeFiles(tier.root / names.NOTICES, attempt, say)
    return StoredNotices(tier, attempt, say) if is_first_of_host else None


WALL_TIME_LEAD_S = 120.0  # where no grace is set: how long before its end a run is stopped


def further_sources(
    options: Options,
    grace_s: float | None,
    world: World,
    environment: Mapping[str, str] | None = None,
) -> list[NoticeSource]:
    """Return the sources of this rank, not started."""
    environment = os.environ if environment is None else environment
    folder = environment.get(SUPERVISOR_VARIABLE)
    sources: list[NoticeSource] = []
    now_s, started_s = time.monotonic(), process_start_s()
    ends_s = wall_time_end(options.wall_time, environment, time.time(), now_s, started_s)
    if ends_s is not None or folder is not None:  # a restore may bring another job, with an end
        ends_s = math.inf if ends_s is None else ends_s
        other_end = OtherJobsEnd(options.wall_time, grace_s)
        sources.append(WallTime(ends_s, lead_s(grace_s, ends_s - started_s), anew=other_end))
    job = slurm.job_to_requeue(environment)
    if world.rank == 0 and job is not None and not environment.get(SLURM_VARIABLE):
        scontrol = slurm.Scontrol(job, environment)
        sources.append(slurm.JobEnd(scontrol.show, lambda whole_s: lead_s(grace_s, whole_s)))
    if world.local_rank == 0:
        sources += _of_this_machine(options.notices, environment)
        if folder:
            sources.append(SupervisorLost(Path(folder)))
        elif kind_of_launch(environment) in (TORCHRUN, ACCELERATE):
            sources.append(AgentLost())
    return sources


def machine_sources(
    wanted: Sequence[str],
    vendor_files: Path = spot.VENDOR_FILES,
    driver: Path = Path(gpu_health.DEVICE_FILE),
) -> list[str]:
    """Return the option names of this machine's notice sources. No network, no driver call."""
    if tuple(wanted) != (AUTO,):
        return list(dict.fromkeys(wanted))
    cloud = spot.this_cloud(vendor_files)
    has_nvml = driver.exists() and importlib.util.find_spec("pynvml") is not None
    return [*([cloud] if cloud else []), *(["nvml"] if has_nvml else [])]


def lead_s(grace_s: float | None, whole_s: float) -> float:
    """Return how long before its end a job of `whole_s` seconds is stopped, in seconds."""
    return grace_s or min(WALL_TIME_LEAD_S, whole_s / 4)


def check_notices(wanted: Sequence[str]) -> None:
    """Refuse notice sources unavailable here, on every rank alike.

    Raises:
        ConfigurationError: a name needs an extra that is not installed.
    """
    if "nvml" in wanted and importlib.util.find_spec("pynvml") is None:
        raise ConfigurationError(
            "the option notices names nvml, but pynvml is not installed",
            hint='pip install "trainckpt[gpu]"',
        )


def _of_this_machine(wanted: Sequence[str], environment: Mapping[str, str]) -> list[NoticeSource]:
    sources: list[NoticeSource] = []
    for name in machine_sources(wanted):
        thread = f"trainckpt-{name}"
        if name == "nvml":
            visible = environment.get("CUDA_VISIBLE_DEVICES", "")
            gpus = gpu_health.GpuHealth(importlib.import_module("pynvml"), visible, logger.warning)
            sources.append(PollingSource(gpus, gpus.pause_s, logger.warning, thread, gpus.close))
        else:
            cloud = spot.CLOUDS[name](spot.metadata_of(name, environment))
            sources.append(PollingSource(cloud, cloud.pause_s, logger.warning, thread))
    return sources


class OtherJobsEnd:
    """Return the end and lead of the job in which a dump of this process was restored, or None.

    The old job's end would stop it as soon as it runs again.
    """

    def __init__(self, option_s: float | None, grace_s: float | None) -> None:
        self._option_s, self._grace_s = option_s, grace_s
        self._job: RestoreAnnouncement | None = None
        self._end: tuple[float, float] | None = None

    def __call__(self) -> tuple[float, float] | None:
        """Return the end on the monotonic clock and the lead in seconds; computed once for each
        job."""
        job = read_restore_announcement()
        if job != self._job and job is not None:
            slurm_ends = {SLURM_VARIABLE: job.job_ends or ""}
            now_s = time.monotonic()
            ends_s = wall_time_end(self._option_s, slurm_ends, time.time(), now_s, job.started)
            ends_s = math.inf if ends_s is None else ends_s
            self._job, self._end = job, (ends_s, lead_s(self._grace_s, ends_s - job.started))
        return self._end
