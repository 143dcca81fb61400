"""One attempt of a run: ranks forked from the warm server, the real torchrun, `trainckpt run`.

All look the same to the driver: rank pids, every process of the attempt, exit codes, signals.
The driver stands for a launcher in one more way: where a forked rank has died, it ends the others,
as torchrun would.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.campaign.gate import GATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.campaign.cases import Settings

ROOT = Path(__file__).resolve().parents[2]
MARK = "TRAINCKPT_CAMPAIGN_MARK"
COMMIT = "CAMPAIGN_COMMIT"
LAST = 4  # micro-batches behind the gate: a stop needs some to come
SHUTDOWN_S = 10  # torchrun's patience with ranks that wait for one that died


class Server:
    """The driver's end of the warm server, with further `modules` loaded; see `server.py`."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.campaign.server", *modules],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, **request: object) -> dict:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the campaign's server has died")
        return json.loads(answer)

    def close(self) -> None:
        with suppress(OSError):  # it has died
            # to be asked: workers that were forked here, and live on, hold this pipe open
            print(json.dumps({"end": True}), file=self._process.stdin, flush=True)
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def server(*modules: str) -> Iterator[Server]:
    """A warm server with these modules loaded too, for as long as the block lasts."""
    one = Server(*modules)
    try:
        yield one
    finally:
        one.close()


class Forked:
    """Ranks forked from the server, in a process group of their own."""

    def __init__(self, server: Server, settings: Settings, argv: list[str], log: Path) -> None:
        self._server = server
        script = str(ROOT / "examples" / f"{settings.model}.py")
        port = free_port()
        ranks = [rank_variables(settings, rank, port) for rank in range(settings.ranks)]
        self._log = log
        self._pids = server.ask(script=script, argv=argv, log=str(log), ranks=ranks)["pids"]

    def rank_pids(self) -> dict[int, int]:
        return {rank: pid for rank, pid in enumerate(self._pids) if alive(pid)}

    def codes(self) -> list[int | None]:
        """Exit code of each rank; None while it runs."""
        return self._server.ask(poll=self._pids)["codes"]

    def members(self) -> list[int]:
        """Every living process of the attempt."""
        return [pid for pid, group in process_groups().items() if group == self._pids[0]]

    def terminate(self, target: str, rank: int) -> None:
        pids = self.rank_pids()
        if target == "group":
            with suppress(ProcessLookupError):
                os.killpg(self._pids[0], signal.SIGTERM)
        for pid in [pids[rank]] if target == "one" and rank in pids else []:
            send(pid, signal.SIGTERM)
        for pid in pids.values() if target == "all" else []:
            send(pid, signal.SIGTERM)

    def kill(self) -> None:
        """The host crashes."""
        self.codes()  # reaps, so that the group's number cannot be anybody else's
        with suppress(ProcessLookupError):
            os.killpg(self._pids[0], signal.SIGKILL)

    def logs(self) -> str:
        files = sorted(self._log.parent.glob(f"{self._log.name}.rank*"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)


class Torchrun:
    """`python -m torch.distributed.run`, and whatever it starts."""

    _module: tuple[str, ...] = ("torch.distributed.run",)
    _variables: ClassVar = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}

    def __init__(self, settings: Settings, argv: list[str], log: Path) -> None:
        self._settings, self._log = settings, log
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        own = {MARK: self._mark} | self._variables | self._more_variables()
        command = [
            *(sys.executable, "-m", *self._module, "--nproc-per-node", str(settings.ranks)),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--"),
            *(*self._script(), *argv),
        ]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                env=environment() | own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _script(self) -> list[str]:
        return [str(ROOT / "examples" / f"{self._settings.model}.py")]

    def _more_variables(self) -> dict[str, str]:
        return {}

    def rank_pids(self) -> dict[int, int]:
        """The children of torchrun that have become Python; loader workers have other parents."""
        found = {}
        for pid in self.members():
            rank = variable(pid, "RANK")
            if rank is not None and parent(pid) == self._process.pid:
                found[int(rank)] = pid
        return found

    def codes(self) -> list[int | None]:
        return [self._process.poll()]

    def members(self) -> list[int]:
        return [pid for pid in process_groups() if variable(pid, MARK) == self._mark]

    def terminate(self, target: str, rank: int) -> None:
        pids = self.rank_pids() if target == "one" else {}
        send(pids.get(rank, self._process.pid), signal.SIGTERM)

    def kill(self) -> None:
        while pids := self.members():
            for pid in pids:
                send(pid, signal.SIGKILL)
            self._process.poll()
        self._process.wait()

    def logs(self) -> str:
        return f"--- {self._log.name}\n{self._log.read_text(errors='replace')}"


class Supervised(Torchrun):
    """`trainckpt run`, its torchrun, and the ranks of that, which stay until `open_gate`."""

    _module = ("trainckpt.cli.main", "run")
    _variables: ClassVar = {}

    def __init__(self, settings: Settings, argv: list[str], log: Path) -> None:
        self._gate = log.with_suffix(".gate")
        super().__init__(settings, argv, log)
        self._ranks: dict[int, int] = {}

    def open_gate(self) -> None:
        """The signal was sent, or none is to be: the run may end."""
        self._gate.touch()

    def _script(self) -> list[str]:
        return [str(ROOT / "tests" / "campaign" / "gate.py"), *super()._script()]

    def _more_variables(self) -> dict[str, str]:
        return {GATE: f"{self._settings.micro_batches - LAST},{self._gate}"}

    def rank_pids(self) -> dict[int, int]:
        """Of the ranks that live; looked for until all have been seen once."""
        if len(self._ranks) < self._settings.ranks:
            for pid in self.members():
                rank, agent = variable(pid, "RANK"), parent(pid)
                if rank is not None and agent and parent(agent) == self._process.pid:
                    self._ranks[int(rank)] = pid
        return {rank: pid for rank, pid in self._ranks.items() if alive(pid)}

    def terminate(self, target: str, rank: int) -> None:
        assert target == "one", target
        pid = self.rank_pids().get(rank)
        if pid is None:
            raise ProcessLookupError(f"rank {rank} has ended")
        send(pid, signal.SIGTERM)


def environment() -> dict[str, str]:
    """Of everything launched: this tree's library, one thread, no options from outside."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINCKPT_", "TORCHELASTIC"))}
    places = [str(ROOT / "src"), kept.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "OMP_NUM_THREADS": "1",
        # c10d asks the name server for the name of every address it connects to; where that does
        # not answer, each connection takes the resolver's time-out, 5 s unless told otherwise.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    return kept | own


def rank_variables(settings: Settings, rank: int, port: int) -> dict[str, str]:
    """What torchrun would set; nothing for a run without ranks."""
    if settings.parallel == "none":
        return {}
    world = str(settings.ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@cache
def library_commit() -> str:
    """Of the tree that is tested: given from outside for an exported one, "" if nobody knows."""
    given = os.environ.get(COMMIT)
    if given is not None or not (ROOT / ".git").exists():
        return given or ""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def process_groups() -> dict[int, int]:
    """Process group of every process that lives (zombies do not)."""
    groups = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - called in a tight loop
        if name.isdecimal() and (fields := stat(int(name))) and fields[0] not in "ZX":
            groups[int(name)] = int(fields[2])
    return groups


def alive(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def parent(pid: int) -> int | None:
    fields = stat(pid)
    return int(fields[1]) if fields else None


def stat(pid: int) -> Sequence[str]:
    """Fields of /proc/PID/stat from the state on: state, parent, group; empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ()
    return text.rpartition(")")[2].split()


def variable(pid: int, name: str) -> str | None:
    """An environment variable `pid` was started with."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    start = f"{name}=".encode()
    found = (entry for entry in block.split(b"\0") if entry.startswith(start))
    return next((entry[len(start) :].decode() for entry in found), None)
