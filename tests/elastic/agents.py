"""Agents of one elastic launch: started, killed and told to stop, alone or with their ranks.

The rendezvous is in a store of its own process, so that any agent may go.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.campaign import launch
from tests.limits import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCRIPT = str(Path(__file__).with_name("train.py"))
MOST = 4
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(1e6)
"""
# A dead agent is given up after 3 s, and no more agents are waited for after 2 s.
RENDEZVOUS = {
    "is_host": 0,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "last_call_timeout": 2,
    "join_timeout": 120,
    "read_timeout": 30,
}
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAINCKPT_RUN = (sys.executable, "-m", "trainckpt", "run")


@dataclass
class Place:
    """Where an agent runs: this host, or one that `enter` leads to."""

    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


class Agents:
    """The agents of one launch, the store of its rendezvous, and what they have said.

    Args:
        folder: Holds the run, the trace of its ranks, and the output of agents.
        starter: The command in front of torchrun's options.
        nodes: Fewest and most agents.
        epochs, samples: Of the training.
        store_at: Where the store of the rendezvous is.
    """

    def __init__(
        self,
        folder: Path,
        *,
        starter: Sequence[str] = TORCHRUN,
        nodes: tuple[int, int] = (1, MOST),
        epochs: int = 1,
        samples: int = 240,
        store_at: Place | None = None,
    ) -> None:
        self.folder, self.trace = folder, folder / "trace"
        self.trace.mkdir(parents=True)
        self.started: list[subprocess.Popen[bytes]] = []
        self._starter, self._nodes = starter, nodes
        self._script = [SCRIPT, str(folder / "run"), str(self.trace), str(epochs), str(samples)]
        self._store_at = store_at or Place()
        self._launches = 0
        self._store: subprocess.Popen[bytes] | None = None
        self.begin_launch()

    def begin_launch(self) -> None:
        """A new rendezvous, as if the job were submitted again."""
        self._end_store()
        self._launches += 1
        self._port = launch.free_port()
        words = [sys.executable, "-c", STORE, self._store_at.address, str(self._port)]
        self._store = subprocess.Popen([*self._store_at.enter, *words], stdout=subprocess.PIPE)
        assert self._store.stdout.readline() == b"ready\n"

    def start(self, place: Place | None = None) -> subprocess.Popen[bytes]:
        """One more agent, in a process group of its own."""
        place = place or Place()
        fewest, most = self._nodes
        conf = ",".join(f"{name}={value}" for name, value in RENDEZVOUS.items())
        command = [
            *(*place.enter, *self._starter),
            *("--nnodes", f"{fewest}:{most}", "--nproc-per-node", "1", "--max-restarts", "50"),
            *("--rdzv-backend", "c10d", "--rdzv-id", f"job{self._launches}"),
            *("--rdzv-endpoint", f"{self._store_at.address}:{self._port}", "--rdzv-conf", conf),
            *("--local-addr", place.address, "--monitor-interval", "0.2", "--", *self._script),
        ]
        environment = {**os.environ, **ENVIRONMENT, **place.variables}
        with (self.folder / f"agent{len(self.started)}").open("wb") as said:
            agent = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, start_new_session=True
            )
        self.started.append(agent)
        return agent

    def train_slowly(self) -> None:
        """Let no run end before its last event; until `train_quickly`."""
        (self.trace / "slowly").touch()

    def train_quickly(self) -> None:
        (self.trace / "slowly").unlink()

    @contextmanager
    def held_before_the_checkpointer(self) -> Iterator[None]:
        """Hold ranks that start meanwhile; entered ones go on at the end."""
        waits = self.trace / "waits"
        waits.touch()
        yield
        waits.unlink()

    def until_held(self, ranks: int) -> None:
        """Wait until so many ranks are held."""
        ends_s = time.monotonic() + HANG_S
        while len(list(self.trace.glob("waiting-*"))) < ranks:
            assert time.monotonic() < ends_s, self.said(3000)
            time.sleep(0.05)

    def running(self) -> list[subprocess.Popen[bytes]]:
        return [agent for agent in self.started if agent.poll() is None]

    def ranks(self, agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Everything that an agent has started and that lives."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(agent.pid).children(recursive=True)
        return []

    def kill_host(self, agent: subprocess.Popen[bytes]) -> None:
        """An agent with all it has started, at once."""
        ranks = self.ranks(agent)
        agent.send_signal(signal.SIGKILL)
        _kill(ranks)
        agent.wait()

    def kill_alone(self, agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """An agent; what it has started lives on. Returns that."""
        ranks = self.ranks(agent)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        return ranks

    def kill_ranks(self, agent: subprocess.Popen[bytes]) -> None:
        """The ranks of an agent, and not what is between the two."""
        for process in self.ranks(agent):
            if _is_rank(process):
                _kill([process])

    def end(self) -> None:
        """Kill what is left."""
        for agent in self.running():
            self.kill_host(agent)
        _kill(self.left_over())
        self._end_store()

    def has_finished(self) -> bool:
        """Whether the newest attempt has finished the run, and its ranks have ended."""
        records = (self.folder / "run/attempts").glob("*.json")
        newest = max(records, key=lambda record: int(record.stem), default=None)
        outcome = json.loads(newest.read_text()).get("outcome") if newest is not None else None
        is_over = outcome is not None and outcome["outcome"] == "finished"
        return is_over and not self.left_ranks()

    def left_ranks(self) -> list[psutil.Process]:
        """Every rank that lives."""
        return [process for process in self.left_over() if _is_rank(process)]

    def left_over(self) -> list[psutil.Process]:
        """Every process of the script that lives."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if self._script[1] in (process.info["cmdline"] or ())
            and process.status() != psutil.STATUS_ZOMBIE
        ]

    def said(self, most: int = 100_000) -> str:
        texts = [
            f"--- {file.name}\n{file.read_text(errors='replace')[-most:]}"
            for file in sorted(self.folder.glob("agent*"))
        ]
        return "\n".join(texts)

    def wait_all(self, timeout_s: float = HANG_S) -> list[int]:
        """The exit codes of all agents that run."""
        ends_s = time.monotonic() + timeout_s
        return [agent.wait(max(ends_s - time.monotonic(), 0.1)) for agent in self.running()]

    def _end_store(self) -> None:
        if self._store is not None:
            self._store.kill()
            self._store.wait()
            self._store.stdout.close()


def _is_rank(process: psutil.Process) -> bool:
    """Whether it runs the script itself, and does not start it."""
    with suppress(psutil.NoSuchProcess):
        return SCRIPT in process.cmdline()[1:3]
    return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
