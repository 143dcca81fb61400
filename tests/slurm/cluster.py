"""A real Slurm on this machine: munged, slurmctld, three slurmd on ports and folders of their own.

    nodes       three, with one task each, although there is one machine: each slurmd has its own
                name, port and spool
    partitions  `low` may be preempted and requeued after a grace time; `high` does that
    timers      short where Slurm has them: a requeued job may start again after 6 s, not 120

Every process is a child of this one, in the foreground, so that each is known and ended by its
id. What cannot start says why, with the last lines of its log.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
START_S, END_S = 60.0, 20.0
GRACE_S = 300
NODES = ("n1", "n2", "n3")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=6
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
MinJobAge=3600
SlurmctldTimeout=300
SlurmdTimeout=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} OverTimeLimit=0
PartitionName=high Nodes=ALL PriorityTier=10
"""


class CannotStart(Exception):
    """Slurm does not run here; says what was tried and what its log says."""


class Cluster:
    """The daemons, and Slurm's own commands against them.

    Attributes:
        variables: What a command needs to find this cluster, not another one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Bring everything up, until all nodes are idle.

        Raises:
            CannotStart: says which daemon, and why.
        """
        for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700)
        self._start_munge()
        controller, *ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
            for node, port in zip(NODES, ports, strict=True)
        )
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host, controller=controller, folder=self.folder, nodes=nodes, grace=GRACE_S
            )
        )
        self._run("slurmctld", "slurmctld", "-D", "-i")
        self._until("slurmctld", lambda: "is UP" in self.try_("scontrol", "ping"))
        for node in NODES:
            self._run(f"slurmd.{node}", "slurmd", "-D", "-N", node)
        self._until("slurmctld", lambda: self.idle() == set(NODES))

    def stop(self) -> None:
        """Cancel what runs, and end the daemons, by their ids."""
        if "slurmctld" in self._daemons:
            self.try_("scancel", "--full", "--signal=KILL", "--user=root")
            self.try_("scancel", "--user=root")
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not self.try_("squeue", "-h").strip(), END_S)
        for process in reversed(self._daemons.values()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._daemons.clear()

    # ---- commands

    def command(
        self, *words: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> str:
        """What a Slurm command prints; an AssertionError with what it said if it fails."""
        environment = clean_environment() if variables is None else variables
        done = subprocess.run(
            words,
            env={**environment, **self.variables},
            cwd=cwd,
            timeout=120,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_(self, *words: str) -> str:
        """The same, or what went wrong: the controller may not be there yet, or not any more."""
        try:
            return self.command(*words)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return f"failed: {error}"

    def submit(self, script: str, *options: str, cwd: Path) -> str:
        """`sbatch --parsable`; the job's id."""
        path = cwd / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        return self.command("sbatch", "--parsable", *options, str(path), cwd=cwd).strip()

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def idle(self) -> set[str]:
        """Nodes that could take a job now."""
        return set(self.try_("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())

    def said(self, name: str = "slurmctld", lines: int = 30) -> str:
        """The end of a daemon's log."""
        path = self.folder / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    # ---- daemons

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._run(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/socket",
            f"--key-file={key}",
            f"--pid-file={folder}/pid",
            f"--log-file={folder}/log",
            f"--seed-file={folder}/seed",
        )
        self._until("munged", (folder / "socket").exists)

    def _run(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=search_path())
        if program is None:
            raise CannotStart(f"{command[0]} is not installed: sh tests/slurm/install.sh, as root")
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]],
                env={**clean_environment(), **self.variables},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _until(self, name: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not condition():
            for daemon, process in self._daemons.items():
                if process.poll() is not None:
                    code = process.returncode
                    raise CannotStart(f"{daemon} ended with {code}:\n{self.said(daemon)}")
            if time.monotonic() > until:
                raise CannotStart(f"not up after {START_S:.0f} s; {name}:\n{self.said(name)}")
            time.sleep(0.1)


def why_not() -> str:
    """Why no Slurm can be started here at all, or ""."""
    missing = [name for name in DAEMONS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (as root, `make test` installs Slurm by apt)"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started as root here"


def search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def clean_environment() -> dict[str, str]:
    """Ours, without what a test run or an outer Slurm set."""
    strange = ("SLURM", "SBATCH", "TRAINCKPT", "PYTEST", "TORCHELASTIC")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(strange)}
    return {**kept, "PATH": search_path()}


def free_ports(number: int) -> list[int]:
    """Below those the system hands out by itself, so that they stay free until they are used."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            if port not in found:
                found.append(port)
    return found


def wait_for(condition: Callable[[], object], limit_s: float, say: Callable[[], str] = str) -> None:
    """Until `condition` holds; an AssertionError with `say()` if it does not in so many seconds."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, say()
        time.sleep(0.2)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster for the block; whatever was started is ended, whatever happens."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
