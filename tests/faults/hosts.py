"""Hosts on one machine: each with a network, mounts, and a name of its own.

A host is a network namespace, joined to the others' by a bridge in one more; every process on it
has a mount namespace with a tmpfs of the host's own over one folder, and the host's name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess

from tests import warm

NAMES = ("alpha", "beta", "gamma", "delta")
_groups = itertools.count()
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
    """Why this machine cannot hold hosts, or ""."""
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
        address: On the network of all.
        enter: Words before a command, to start it on this host.
        own: A folder whose content only this host sees.
    """

    def __init__(self, server, number, names, own):
        self._server = server
        self.name, self.own = NAMES[number], own
        self.address = f"10.77.0.{number + 1}"
        self._namespace, self._names = names[number], names
        self._number, self._holder = number, None

    @property
    def enter(self):
        return ["nsenter", "--net", "--mount", "--uts", "--target", str(self._holder.pid)]

    def boot(self):
        """Join the network and mount what is its own."""
        inside = ["ip", "-n", self._namespace]
        subprocess.run([*inside, "addr", "add", f"{self.address}/24", "dev", "link0"], check=True)
        for device in ("lo", "link0"):
            subprocess.run([*inside, "link", "set", device, "up"], check=True)
        self._holder = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self._namespace,
                "unshare",
                "--mount",
                "--uts",
                "sh",
                "-c",
                HOLD.format(name=self.name, own=self.own),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout.readline() == "ready\n"

    def run(self, command):
        """What a command says on this host."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, check=False)
        return done.stdout

    def python(self, words, **environment):
        """Start `python WORD ...` on this host; its process."""
        variables = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "link0",
            "RES_OPTIONS": "timeout:1 attempts:1",
            **environment,
        }
        return warm.Told(self._server, words, together=True, env=variables, enter=self._holder.pid)

    def down(self):
        """Gone, with all that was its own."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
            self._holder.stdout.close()
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True, check=False)


@contextlib.contextmanager
def hosts_of(server, own, number):
    """So many hosts that reach each other, with `own` a folder of each one's own.

    Their programs are forked from this warm server.
    """
    own.mkdir(exist_ok=True)
    group = f"trainckpt-{os.getpid()}-{next(_groups)}"
    switch, names = f"{group}s", [f"{group}{name[0]}" for name in NAMES[:number]]
    hosts = [Host(server, each, names, own) for each in range(number)]
    try:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "add", name], check=True)
        _ip(switch, "link add bridge0 type bridge")
        _ip(switch, "link set bridge0 up")
        for each, host in enumerate(hosts):
            port = f"port{each}"
            _ip(switch, f"link add {port} type veth peer name link0 netns {names[each]}")
            _ip(switch, f"link set {port} master bridge0 up")
            host.boot()
        yield hosts
    finally:
        for host in hosts:
            host.down()
        subprocess.run(["ip", "netns", "del", switch], capture_output=True, check=False)


def _ip(namespace, words):
    subprocess.run(["ip", "-n", namespace, *words.split()], check=True)


def two_hosts(server, own):
    """Two of them."""
    return hosts_of(server, own, 2)


def start_job(hosts, program, *arguments, **environment):
    """One rank of `tests.faults.<program>` on each host; their processes, by rank."""
    return [
        host.python(
            ["-m", f"tests.faults.{program}", *arguments],
            RANK=str(rank),
            LOCAL_RANK="0",
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=hosts[0].address,
            MASTER_PORT="29400",
            **environment,
        )
        for rank, host in enumerate(hosts)
    ]


def ends(processes, timeout_s=120):
    """Exit code and output of each."""
    found = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout_s)
            found.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout_s)
    return found
