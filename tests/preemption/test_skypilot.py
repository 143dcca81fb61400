"""The SkyPilot task of `configs/`, through preemptions: exact on the last of its machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.cli.test_run_and_resume import merged
from tests.preemption.skypilot import FAILED, RECOVERING, SUCCEEDED, ManagedJob
from tests.s3_servers import BUCKET
from tests.start_commands.conftest import straight  # noqa: F401 - a fixture
from tests.start_commands.pace import SLOW
from tests.start_commands.started import ROOT, Run, wait_for
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.catalog import read_catalog

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.format.attempt_record import AttemptRecord

RANKS = 2
# The example under the name that the task has, with the flags that the task leaves to it.
TRAIN = """
import runpy, sys
sys.path[:0] = [{root!r}, {examples!r}]
from tests.start_commands import pace
pace.PAUSE_S = 0.2
pace.pace()
sys.argv[1:1] = {flags!r}
runpy.run_path({example!r}, run_name="__main__")
"""


class InABucket(Run):
    """A run of the example, in a bucket."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, RANKS)
        self.place = url

    @property
    def argv(self) -> list[str]:
        flags = super().argv
        flags[flags.index("--save-every") + 1] = "3"
        return flags

    def record(self, attempt: int) -> AttemptRecord:
        return attempt_history.read_attempts(open_run_tier(self.place))[attempt]

    def newest_commit(self) -> str:
        """Its name; "" if there is none."""
        tier = open_run_tier(self.place)
        attempts = attempt_history.read_attempts(tier)
        found = read_catalog(tier, attempt_history.run_id(tier), attempts) if attempts else []
        return next((str(one.name) for one in found if one.usable), "")


@pytest.fixture
def run(tmp_path, rclone_server, at):
    at(rclone_server)
    return InABucket(tmp_path / "run", f"s3://{BUCKET}/skypilot/{tmp_path.name}")


@pytest.fixture
def launched(tmp_path, rclone_server, run):
    """Launches the task of `configs/` as its first lines say; ends what is left of it."""
    jobs = []

    def launched(train: str = "", **variables: str) -> ManagedJob:
        task = yaml.safe_load((ROOT / "configs" / "skypilot.yaml").read_text(encoding="utf-8"))
        task["workdir"] = tmp_path / "workdir"
        task["workdir"].mkdir()
        flags = run.argv
        where = flags.index("--run")
        own = {
            "root": str(ROOT),
            "examples": str(ROOT / "examples"),
            "example": str(ROOT / "examples" / "char_gpt.py"),
            "flags": flags[:where] + flags[where + 2 :],
        }
        (task["workdir"] / "train.py").write_text(train or TRAIN.format(**own))
        given = {"RUN": run.place, "SKYPILOT_NUM_GPUS_PER_NODE": str(RANKS)}
        given |= rclone_server.environment() | variables
        jobs.append(ManagedJob(task, tmp_path, given))
        return jobs[-1]

    yield launched
    for job in jobs:
        job.end()


def wait_for_progress(run, job, more=3):
    """Until its present machine has trained some more."""
    wanted = run.trained() + more

    def trained() -> bool:
        assert job.machine.exit_code() is None, job.machine.said()
        return run.trained() >= wanted

    wait_for(trained)


def announce_end(cloud, name):
    if name == "gce":
        cloud.preempt()
    else:
        cloud.action = json.dumps({"action": "terminate", "time": cloud.aws_time(120)})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gce", "GCE preemption"),
        pytest.param("aws", "AWS spot terminate", marks=pytest.mark.long),
    ],
)
def test_a_preempted_task_goes_on_on_another_machine_to_the_same_bit(
    run,
    launched,
    straight,  # noqa: F811
    name,
    reason,
):
    """The notice alone stops it, saved; the controller sees a code; nothing is trained twice."""
    (run.folder / SLOW).touch()
    job = launched(TRAINCKPT_NOTICES=name)
    wait_for_progress(run, job)
    announce_end(job.machine.cloud, name)
    assert job.watch() == RECOVERING, job.machines[0].said()
    assert job.machines[0].exit_code() == 75
    (run.folder / SLOW).unlink()
    run.assert_stopped(1)
    assert run.record(1).outcome["reason"] == reason
    assert job.watch() == SUCCEEDED, job.machine.said()
    run.assert_exact(straight(RANKS))


@pytest.mark.long
def test_a_machine_that_is_gone_without_a_notice_costs_what_was_not_saved_yet(
    run,
    launched,
    straight,  # noqa: F811
):
    (run.folder / SLOW).touch()
    job = launched(TRAINCKPT_NOTICES="gce")
    wait_for(lambda: run.newest_commit() != "")
    wait_for_progress(run, job, more=1)
    job.machine.end()
    saved = run.newest_commit()
    (run.folder / SLOW).unlink()
    assert job.watch() == RECOVERING
    assert job.watch() == SUCCEEDED, job.machine.said()
    assert f"attempt 2: resumed from {saved}, " in job.machine.said()
    whole = straight(RANKS)
    for rank in range(RANKS):
        assert merged(run.folder, rank) == merged(whole.folder, rank)


@pytest.mark.long
def test_a_task_that_cannot_go_on_fails_after_as_many_machines_as_its_file_says(launched):
    job = launched(train="raise SystemExit('no such data')\n")
    assert [job.watch() for _ in range(4)] == [*[RECOVERING] * 3, FAILED]
    assert len(job.machines) == 4
