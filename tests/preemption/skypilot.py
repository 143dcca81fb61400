"""A managed job of SkyPilot, played by its documented rules (0.14): machines, and a controller.

The controller never signals a job. It asks now and then how machine and job are:

    the machine is gone     a new one, and the task begins again on it
    the job ended with 0    done
    with another code       a new machine: uncounted if `recover_on_exit_codes` has the code, else
                            as often as `max_restarts_on_errors` says; then failed

With the strategy EAGER_NEXT_REGION the old machine is ended before there is a new one. The task's
`run` is a script of an interactive bash in ~/sky_workdir, which the task's `workdir` was copied to.
A machine here is a home folder, a metadata server, memory and processes of its own, and nothing
of it outlives it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaign import launch
from tests.limits import HANG_S
from tests.preemption.metadata_server import serving
from trainckpt.storage.shared_memory import ROOT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

RECOVERING, SUCCEEDED, FAILED = "RECOVERING", "SUCCEEDED", "FAILED"
MARK = "SKYPILOT_TEST_MACHINE"  # in the environment of all processes of a machine
GAP_S = 0.05  # SkyPilot's own is 15 s


class Machine:
    """One machine, on which the task runs from now on.

    Attributes:
        cloud: What its metadata server says.
    """

    def __init__(self, home: Path, task: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self._home, self._stack = home, ExitStack()
        shutil.copytree(task["workdir"], home / "sky_workdir")
        self.cloud = self._stack.enter_context(serving())
        address = self.cloud.url.removeprefix("http://")
        script = home / "sky_app.sh"
        exports = [f"export {k}={shlex.quote(v)}" for k, v in {**task["envs"], **variables}.items()]
        script.write_text("\n".join(["cd ~/sky_workdir", *exports, task["run"], ""]))
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {
            MARK: str(home),
            "HOME": str(home),
            "PATH": programs,  # what `setup` would have installed
            "PS1": "",
            "GCE_METADATA_HOST": address,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.cloud.url,
            ROOT_VARIABLE: str(home),
        }
        self._log = home.with_suffix(".log")
        with self._log.open("wb") as out:
            self._job = subprocess.Popen(
                ["bash", "-i", str(script)],
                env=launch.environment() | own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def is_gone(self) -> bool:
        return not self._home.exists()

    def exit_code(self) -> int | None:
        """The job's; None while it runs."""
        return self._job.poll()

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        """Take it away, with all that is on it."""
        while pids := self._processes():
            for pid in pids:
                launch.send(pid, 9)
            self._job.poll()
        self._job.wait()
        self._stack.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _processes(self) -> list[int]:
        mine = str(self._home)
        return [pid for pid in launch.process_groups() if launch.variable(pid, MARK) == mine]


class ManagedJob:
    """A task from its launch to its end.

    Args:
        task: As its YAML file says, with a `workdir` that exists.
        folder: For the machines.
        variables: `--env` of `sky jobs launch`, and what SkyPilot sets by itself.
    """

    def __init__(self, task: Mapping[str, Any], folder: Path, variables: Mapping[str, str]) -> None:
        self._task, self._folder, self._variables = task, folder, variables
        self._recovery = task["resources"]["job_recovery"]
        self._num_errors = 0
        self.machines: list[Machine] = []
        self._launch()

    @property
    def machine(self) -> Machine:
        """The present one."""
        return self.machines[-1]

    def watch(self) -> str:
        """Wait until the job or its machine is gone, and do what the controller does then."""
        until_s = time.monotonic() + HANG_S
        while not self.machine.is_gone and self.machine.exit_code() is None:
            assert time.monotonic() < until_s, self.machine.said()
            time.sleep(GAP_S)
        if not self.machine.is_gone:
            code = self.machine.exit_code()
            if code == 0:
                return SUCCEEDED
            if code not in self._recovery["recover_on_exit_codes"]:
                self._num_errors += 1
                if self._num_errors > self._recovery["max_restarts_on_errors"]:
                    return FAILED
            assert self._recovery["strategy"] == "EAGER_NEXT_REGION"
            self.machine.end()
        self._launch()
        return RECOVERING

    def end(self) -> None:
        """Leave no machine."""
        for machine in self.machines:
            machine.end()

    def _launch(self) -> None:
        home = self._folder / f"machine{len(self.machines) + 1}"
        self.machines.append(Machine(home, self._task, self._variables))
