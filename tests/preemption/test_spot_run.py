"""A run on a spot machine: the cloud's word alone stops it, saved, and it goes on elsewhere."""

from __future__ import annotations

import json

from tests.preemption.metadata_server import serving
from tests.start_commands.conftest import log, straight  # noqa: F401 - fixtures
from tests.start_commands.started import ROOT, Forks, Run, ended, stop

EXAMPLE = str(ROOT / "tests" / "slurm" / "job.py")  # slow enough for a question every 5 s


def test_a_run_whose_machine_is_taken_back_stops_in_time_and_goes_on_to_the_same_bit(
    server,
    straight,  # noqa: F811
    log,  # noqa: F811
    tmp_path,
):
    run = Run(tmp_path / "r", 1)
    with serving() as cloud:

        def take_back() -> None:
            left = cloud.aws_time(120)
            cloud.action = json.dumps({"action": "terminate", "time": left})

        variables = {
            "TRAINCKPT_NOTICES": "aws",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": cloud.url,
        }
        first = Forks(server, EXAMPLE, run.argv, log(), [variables])
        assert stop(first, run, take_back, more=2) == [75], first.said()
    run.assert_stopped(1)
    assert run.record(1).outcome["reason"] == "AWS spot terminate"

    second = Forks(server, EXAMPLE, run.argv, log(), [{"TRAINCKPT_NOTICES": "none"}])
    assert ended(second) == [0], second.said()
    run.assert_exact(straight(1))
