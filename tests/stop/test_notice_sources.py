"""Who is asked about this machine: what the option names, or what the machine itself shows."""

from __future__ import annotations

import math
import time

import pytest

from trainckpt.attempt.options import read_options
from trainckpt.attempt.status_files import RESTORED_FILE, SUPERVISOR_VARIABLE, restore_files
from trainckpt.errors import ConfigurationError
from trainckpt.preemption.polling import PollingSource
from trainckpt.preemption.slurm import JobEnd
from trainckpt.preemption.wall_time import WallTime
from trainckpt.ranks.world import World
from trainckpt.stop import notice_sources
from trainckpt.stop.notice_sources import (
    OtherJobsEnd,
    check_notices,
    further_sources,
    machine_sources,
)

FIRST, SECOND, OTHER_HOST = World(0, 4, 0, "a"), World(1, 4, 1, "a"), World(2, 4, 0, "b")


def test_on_a_machine_of_no_cloud_and_without_a_driver_nobody_is_asked(tmp_path):
    assert machine_sources(("auto",), tmp_path, tmp_path / "nvidiactl") == []


def test_the_firmware_and_the_drivers_file_decide_who_is_asked(tmp_path):
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    (tmp_path / "nvidiactl").touch()
    assert machine_sources(("auto",), tmp_path, tmp_path / "nvidiactl") == ["aws", "nvml"]
    assert machine_sources((), tmp_path, tmp_path / "nvidiactl") == []
    assert machine_sources(("gce", "gce"), tmp_path, tmp_path / "nvidiactl") == ["gce"]


def test_one_rank_of_each_host_asks_about_it_and_one_of_all_asks_slurm():
    options = read_options({"notices": "azure", "wall_time": "1 h"}, {})
    job = {"SLURM_JOB_ID": "1"}
    kinds = {
        world: [type(source) for source in further_sources(options, None, world, job)]
        for world in (FIRST, SECOND, OTHER_HOST)
    }
    assert kinds == {
        FIRST: [WallTime, JobEnd, PollingSource],
        SECOND: [WallTime],
        OTHER_HOST: [WallTime, PollingSource],
    }
    job["SLURM_JOB_END_TIME"] = "1"
    kinds_of = [type(source) for source in further_sources(options, None, FIRST, job)]
    assert kinds_of == [WallTime, PollingSource]


def test_a_name_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(ConfigurationError, match="notices='aws,ibm'") as refused:
        read_options({"notices": "aws,ibm"}, {})
    assert "aws,gce,azure,nvml" in (refused.value.hint or "")
    assert read_options({"notices": ["aws", "nvml"]}, {}).notices == ("aws", "nvml")


def test_gpu_health_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr(notice_sources.importlib.util, "find_spec", lambda _: None)
    check_notices(("auto",))
    check_notices(("aws",))
    with pytest.raises(ConfigurationError) as refused:
        check_notices(("nvml",))
    assert refused.value.hint == 'pip install "trainckpt[gpu]"'


def test_the_wall_time_of_restored_processes_is_that_of_the_job_they_go_on_in(
    tmp_path, monkeypatch
):
    """The old job's end would stop them at once; one of none is told by nobody."""
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(tmp_path))
    now_s = time.monotonic()
    end = OtherJobsEnd(100.0, 5.0)
    assert end() is None
    (tmp_path / RESTORED_FILE).write_text(restore_files(2, now_s, None)[RESTORED_FILE])
    assert end() == (now_s + 100.0, 5.0)
    job_ends = str(time.time() + 50.0)
    (tmp_path / RESTORED_FILE).write_text(restore_files(3, now_s, job_ends)[RESTORED_FILE])
    assert end()[0] == pytest.approx(now_s + 50.0, abs=10.0)
    assert end() == end()
    assert OtherJobsEnd(None, None)()[0] == pytest.approx(now_s + 50.0, abs=10.0)
    (tmp_path / RESTORED_FILE).write_text(restore_files(4, now_s, None)[RESTORED_FILE])
    assert OtherJobsEnd(None, None)() == (math.inf, 120.0)


def test_a_rank_under_a_supervisor_looks_for_another_jobs_end_though_its_own_has_none():
    options = read_options({"notices": "none"}, {})
    assert further_sources(options, None, FIRST, {}) == []
    source, _ = further_sources(options, None, FIRST, {SUPERVISOR_VARIABLE: "/nowhere"})
    assert isinstance(source, WallTime)
    assert source.poll() == []
