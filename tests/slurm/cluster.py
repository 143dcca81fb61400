"""A real Slurm on this machine: munged, slurmctld, three slurmd on ports and folders of their own.

    nodes       three, with one task each, although there is one machine: each slurmd has its own
                name, port and spool
    partitions  `low` may be preempted and requeued after a grace time; `high` does that
    timers      short where Slurm has them: a requeued job may start again after 6 s, not 120

`tests.daemons` starts and ends the processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

from tests.daemons import Daemons, clean_environment, free_ports, search_path, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
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


class Cluster:
    """The daemons, and Slurm's own commands against them.

    Attributes:
        variables: What a command needs to find this cluster, not another one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = Daemons(folder, start_s=START_S, variables=self.variables)

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
        self._daemons.start("slurmctld", "slurmctld", "-D", "-i")
        self._daemons.until("slurmctld", lambda: "is UP" in self.try_("scontrol", "ping"))
        for node in NODES:
            self._daemons.start(f"slurmd.{node}", "slurmd", "-D", "-N", node)
        self._daemons.until("slurmctld", lambda: self.idle() == set(NODES))

    def stop(self) -> None:
        """Cancel what runs, and end the daemons, by their ids."""
        if "slurmctld" in self._daemons:
            self.try_("scancel", "--full", "--signal=KILL", "--user=root")
            self.try_("scancel", "--user=root")
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not self.try_("squeue", "-h").strip(), END_S)
        self._daemons.stop()

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

    def said(self, name: str = "slurmctld") -> str:
        """The end of a daemon's log."""
        return self._daemons.said(name)

    # ---- daemons

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._daemons.start(
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
        self._daemons.until("munged", (folder / "socket").exists)


def why_not() -> str:
    """Why no Slurm can be started here at all, or ""."""
    missing = [name for name in DAEMONS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (as root, `make test` installs Slurm by apt)"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started as root here"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster for the block; whatever was started is ended, whatever happens."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
