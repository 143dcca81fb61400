"""A farm: several hosts on one machine, joined by a switch, that can be lost one by one.

A host is a network namespace and a mount namespace with a tmpfs of its own, its memory. Its ranks
are forked from a process that has loaded what they need, and enter the host before they do anything
else. A host is lost with its processes, its link and its memory; booted again under another name it
is a replacement that has nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import signal
import subprocess
import sys
import traceback

from tests.faults import hosts
from tests.limits import HANG_S
from tests.ranks.processes import context

# As `hosts.HOLD`; and names come from a file, since c10d asks for the name of every address.
HOLD = """
set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs -o size=256m tmpfs {own}
echo 'hosts: files' > {own}/nsswitch.conf
for n in $(seq 1 32); do echo "10.78.0.$n at$n"; done > {own}/hosts
echo "127.0.0.1 localhost {name}" >> {own}/hosts
mount --bind {own}/nsswitch.conf /etc/nsswitch.conf
mount --bind {own}/hosts /etc/hosts
echo ready
exec sleep 100000
"""
_numbers = itertools.count()


@functools.cache
def why_not():
    """Why this machine cannot hold a farm, or ""."""
    if why := hosts.why_not():
        return why
    name = f"trainckpt-{os.getpid()}-bridge"
    bridge = ["ip", "-n", name, "link", "add", "bridge", "type", "bridge"]
    _run("ip", "netns", "add", name)
    made = subprocess.run(bridge, capture_output=True, check=False)
    _run("ip", "netns", "del", name)
    return "" if made.returncode == 0 else "this kernel has no bridges between network namespaces"


class Farm:
    """Hosts by number, from 0.

    Attributes:
        own: A folder whose content each host has for itself: its memory.
    """

    def __init__(self, own):
        self.own = own
        own.mkdir()
        self._prefix = f"trainckpt-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}s"
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        self._holders, self._ranks, self._boots = {}, [], itertools.count(1)
        self._started, self._ends = [], {}
        self._forker = None

    def holder(self, number):
        """The process that holds the namespaces of this host."""
        return self._holders[number].pid

    def boot(self, number):
        """Start a host that has nothing yet."""
        namespace, port = f"{self._prefix}h{number}", f"port{number}"
        _run("ip", "netns", "add", namespace)
        _run(
            "ip",
            "-n",
            self._switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "link0",
            "netns",
            namespace,
        )
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        # As the one before, or the others would go on talking to that for a minute.
        _run(
            "ip", "-n", namespace, "link", "set", "link0", "address", f"02:00:00:00:00:{number:02x}"
        )
        _run("ip", "-n", namespace, "addr", "add", f"{self.address(number)}/24", "dev", "link0")
        for device in ("lo", "link0"):
            _run("ip", "-n", namespace, "link", "set", device, "up")
        name = f"host{number}-{next(self._boots)}"
        holder = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                "unshare",
                "--mount",
                "--uts",
                "sh",
                "-c",
                HOLD.format(name=name, own=self.own),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout.readline() == "ready\n"
        self._holders[number] = holder

    def address(self, number):
        return f"10.78.0.{number + 1}"

    def lose(self, number):
        """The host is gone: its processes, its link, its memory."""
        holder, namespace = self._holders.pop(number), f"{self._prefix}h{number}"
        self._kill([rank for at, rank in self._ranks if at == number])
        _run("ip", "-n", namespace, "link", "del", "link0")
        holder.kill()
        holder.wait()
        holder.stdout.close()
        _run("ip", "netns", "del", namespace)

    def start(self, numbers, program, *arguments, log, **environment):
        """One rank of `program(*arguments)` on each of these hosts; they print to `log`.

        Returns their processes.
        """
        self._ranks = []
        for rank, number in enumerate(numbers):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": 0,
                "WORLD_SIZE": len(numbers),
                "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": self.address(numbers[0]),
                "MASTER_PORT": 29400 + len(self._started),
                "GLOO_SOCKET_IFNAME": "link0",
                "RES_OPTIONS": "timeout:1 attempts:1",
                "TRAINCKPT_MEMORY": self.own,
                **environment,
            }
            told = {name: str(value) for name, value in variables.items()}
            self._ranks.append(
                (
                    number,
                    self._ask("start", self._holders[number].pid, program, arguments, log, told),
                )
            )
        self._started += [rank for _, rank in self._ranks]
        return [rank for _, rank in self._ranks]

    def kill(self):
        """All ranks of the last start, at once; the hosts stay."""
        self._kill([rank for _, rank in self._ranks])

    def ends(self):
        """Exit codes of all ranks."""
        return [self._end(rank) for _, rank in self._ranks]

    def ends_but(self, numbers):
        """Exit codes of all ranks but these, which may never end by themselves."""
        return [self._end(rank) for at, (_, rank) in enumerate(self._ranks) if at not in numbers]

    def end(self, rank):
        """Exit code of this process, also of one that an earlier `start` returned."""
        return self._end(rank)

    @property
    def all_run(self):
        return self._ask("poll") == 0

    def _kill(self, ranks):
        """Processes of which none was waited for yet, so that their numbers are theirs."""
        ranks = [rank for rank in ranks if rank not in self._ends]
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        for rank in ranks:
            self._end(rank)

    def _end(self, rank):
        if rank not in self._ends:
            self._ends[rank] = self._ask("wait", rank)
        return self._ends[rank]

    def _ask(self, *request):
        if self._forker is None:
            self._pipe, there = context.Pipe()
            self._forker = context.Process(target=_fork, args=(there,), daemon=True)
            self._forker.start()
            there.close()
        self._pipe.send(request)
        assert self._pipe.poll(HANG_S), request
        return self._pipe.recv()

    def down(self):
        self._kill(self._started)
        if self._forker is not None:
            self._pipe.close()
            self._forker.join(HANG_S)
        for number in list(self._holders):
            self.lose(number)
        _run("ip", "netns", "del", self._switch)


@contextlib.contextmanager
def farm(own, size):
    """So many hosts, that reach each other."""
    made = Farm(own)
    try:
        for number in range(size):
            made.boot(number)
        yield made
    finally:
        made.down()


def _fork(pipe):
    """Fork ranks, and tell how they end."""
    import torch._dynamo  # what an optimizer imports, a second or two
    import torch.nn.parallel  # noqa: F401

    import trainckpt  # noqa: F401

    ranks = []
    with contextlib.suppress(EOFError):
        while True:
            verb, *what = pipe.recv()
            if verb == "start":
                rank = os.fork()
                if rank == 0:
                    _be_there(*what)
                ranks.append(rank)
                pipe.send(rank)
            elif verb == "wait":
                ranks.remove(what[0])
                pipe.send(os.waitstatus_to_exitcode(os.waitpid(what[0], 0)[1]))
            else:  # how many have ended that nobody waited for
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                pipe.send(sum(os.waitid(os.P_PID, rank, flags) is not None for rank in ranks))


def _be_there(holder, program, arguments, log, variables):
    """Enter the host, be the rank."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        descriptor = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(descriptor)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    code = 1
    try:
        code = program(*arguments) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True)
