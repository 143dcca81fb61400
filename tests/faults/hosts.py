"""Two hosts on one machine: each with a network, mounts, and a name of its own.

A host is a network namespace, joined to the other's by a pair of virtual interfaces; every process
on it has a mount namespace with a tmpfs of the host's own over one folder, and the host's name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("alpha", "beta")
_pairs = itertools.count()
# The host's mounts, made once and held by a sleeping process; programs enter them.
HOLD = """
set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs -o size=256m tmpfs {own}
echo ready
exec sleep 3600
"""


def why_not():
    """Why this machine cannot hold two hosts, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [t for t in ("ip", "unshare", "nsenter", "mount", "hostname") if not shutil.which(t)]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    name = f"trainckpt-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this container may not make network namespaces"


class Host:
    """One of them.

    Attributes:
        name: As its processes see it.
        address: On the link to the other.
        own: A folder whose content only this host sees.
    """

    def __init__(self, number, names, own):
        self.name, self.own = NAMES[number], own
        self.address = f"10.77.0.{number + 1}"
        self._namespace, self._names = names[number], names
        self._number, self._holder = number, None

    def boot(self):
        """Join the network and mount what is its own."""
        inside = ["ip", "-n", self._namespace]
        subprocess.run([*inside, "addr", "add", f"{self.address}/24", "dev", "link0"], check=True)
        for device in ("lo", "link0"):
            subprocess.run([*inside, "link", "set", device, "up"], check=True)
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace, "unshare", "--mount", "--uts",
             "sh", "-c", HOLD.format(name=self.name, own=self.own)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout.readline() == "ready\n"

    def start(self, command, **environment):
        """Start a command on this host; its process."""
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "link0",
                     "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONDONTWRITEBYTECODE": "1",
                     "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}",
                     **environment}  # fmt: skip
        enter = ["nsenter", "--net", "--mount", "--uts", "--target", str(self._holder.pid)]
        return subprocess.Popen(
            [*enter, "--wd=" + str(ROOT), *command],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def down(self):
        """Gone, with all that was its own."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
            self._holder.stdout.close()
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True, check=False)


@contextlib.contextmanager
def two_hosts(own):
    """Two hosts that reach each other, with `own` a folder of each one's own."""
    own.mkdir()
    names = [f"trainckpt-{os.getpid()}-{next(_pairs)}{side}" for side in "ab"]
    hosts = [Host(number, names, own) for number in (0, 1)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(
            ["ip", "link", "add", "link0", "netns", names[0], "type", "veth",
             "peer", "name", "link0", "netns", names[1]], check=True,
        )  # fmt: skip
        for host in hosts:
            host.boot()
        yield hosts
    finally:
        for host in hosts:
            host.down()


def start_job(hosts, program, *arguments, **environment):
    """One rank of `tests.faults.<program>` on each host; their processes, by rank."""
    return [
        host.start(
            [sys.executable, "-m", f"tests.faults.{program}", *map(str, arguments)],
            RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=hosts[0].address, MASTER_PORT="29400", **environment,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def ends(processes, timeout_s=120):
    """Exit code and output of each."""
    found = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout_s)
            found.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found
