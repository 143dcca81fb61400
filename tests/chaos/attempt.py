"""One attempt of a case: its ranks on their hosts, or `trainckpt run`, and all they have started.

Nobody else starts processes meanwhile, and no other process of the machine is to be seen here: who
is new belongs to the attempt.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests import warm
from tests.campaign import launch
from tests.campaign.gate import GATE
from tests.chaos import rooms
from tests.chaos.rooms import DUMPS, RANKS, S3, TIER
from tests.s3_servers import BUCKET

if TYPE_CHECKING:
    from tests.chaos.rooms import Room
    from tests.chaos.stage import Stage

LAST = 4  # micro-batches behind the gate
PACE_S = 0.03
PORT = 29400


class Places:
    """Where the files of a case are.

    Attributes:
        folder: Of all that is nobody's but the driver's: traces, logs.
        name: What the run is called on the command line.
        run: The run directory as files, where nothing goes wrong; of an object store too.
        tier: The same of the slower tier, if there is one.
    """

    def __init__(self, stage: Stage, room: Room, seed: int) -> None:
        self.folder = stage.folder / f"case{seed}"
        self.folder.mkdir(exist_ok=True)
        name, self.tier = f"run{seed}", None
        stage.begin(room)
        if room.place == S3:
            self.name, self.run = f"s3://{BUCKET}/{name}", stage.bucket / name
        elif room.place in rooms.ON_DISK:
            self.name, self.run = str(stage.disk.folder / name), stage.disk.backing / name
        elif room.place == rooms.LATE:
            self.name, self.run = str(stage.late_folder / name), stage.late_backing / name
        else:
            self.run = self.folder / "run"
            self.name = str(self.run)
        if room.place == TIER:
            self.tier = stage.bucket / name

    @property
    def clock(self) -> Path:
        return self.folder / "clock"


class Attempt:
    """Processes, by rank; or the one that launches them."""

    def __init__(
        self,
        stage: Stage,
        room: Room,
        places: Places,
        number: int,
        *,
        restarts: int,
        pace_s: float = PACE_S,
    ) -> None:
        self._pace_s = pace_s
        self._stage, self._room, self._places = stage, room, places
        stage.begin(room)
        self._known = set(launch.process_groups())
        # Restored processes know the gate of the attempt that was dumped.
        self.gate = places.folder / ("gate" if room.launcher == DUMPS else f"gate{number}")
        self.gate.unlink(missing_ok=True)
        self.environment = {**launch.environment(), **self._options(0)}
        self.log = places.folder / f"attempt{number}.log"
        self.log.touch()
        self._out = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        self._port = launch.free_port() if room.hosts == 1 else PORT + number % 1000
        self.launched_s = time.monotonic()
        script = [str(launch.ROOT / "tests/chaos/train.py"), *self._example()]
        if room.launcher == DUMPS and (places.run / "run.json").exists():
            words = ["-m", "trainckpt", "resume", "--max-restarts", str(restarts), places.name]
            self._processes = [self._start(words, 0, {})]
        elif room.launcher != RANKS:
            options = ["--nproc-per-node", str(room.ranks), "--max-restarts", str(restarts)]
            address = ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
            words = ["-m", "trainckpt", "run", *options, *address, "--", *script]
            words[3:3] = ["--dumps", "on"] if room.launcher == DUMPS else []
            self._processes = [self._start(words, 0, {})]
        else:
            self._processes = [
                self._start(script, self.host_of(rank), self._rank_variables(rank))
                for rank in range(room.ranks)
            ]

    def host_of(self, rank: int) -> int:
        """The host of a rank: as many on each, or nearly."""
        return rank * self._room.hosts // self._room.ranks

    def _start(self, words: list[str], host: int, variables: dict[str, str]) -> warm.Process:
        enter = self._stage.farm.holder(host) if self._room.hosts > 1 else None
        env = {**launch.environment(), **self._options(host), **variables}
        server = self._stage.server(self._room)
        return warm.Process(server, words, self._out, self._out, env=env, enter=enter)

    def _example(self) -> list[str]:
        settings = self._room.settings
        example = str(launch.ROOT / "examples" / f"{settings.model}.py")
        return [example, *settings.argv(self._places.name, str(self._places.folder / "trace"))]

    def _rank_variables(self, rank: int) -> dict[str, str]:
        if self._room.layout == "none":
            return {}
        host = self.host_of(rank)
        there = [r for r in range(self._room.ranks) if self.host_of(r) == host]
        found = launch.rank_variables(self._room.settings, rank, self._port)
        found |= {"LOCAL_RANK": str(there.index(rank)), "LOCAL_WORLD_SIZE": str(len(there))}
        if self._room.hosts > 1:
            found |= {"MASTER_ADDR": self._stage.farm.address(0), "GLOO_SOCKET_IFNAME": "link0"}
        return found

    def _options(self, host: int) -> dict[str, str]:
        room, stage, places = self._room, self._stage, self._places
        memory = stage.farm.own if room.hosts > 1 else stage.memory_of(room, host)
        last = room.settings.micro_batches - LAST
        found = {
            "TRAINCKPT_MEMORY": str(memory),
            "TRAINCKPT_CACHE": str(places.folder / "cache"),
            "CHAOS_PACE_S": str(self._pace_s),
            "CHAOS_CLOCK": str(places.clock),
            GATE: f"{last},{self.gate}",
            "CHAOS_GATE": f"{last},{self.gate}",
        }
        if room.redundancy != "none":
            found |= {
                "TRAINCKPT_REDUNDANCY": room.redundancy,
                "TRAINCKPT_MEMORY_EVERY": "1 step",
            }
        if room.survivors:
            found["TRAINCKPT_SURVIVORS"] = "5 s"
        if room.encrypted:
            identity = places.folder / "identity"
            found["TRAINCKPT_IDENTITY"] = str(identity)
            found["TRAINCKPT_ENCRYPT_TO"] = (places.folder / "recipient").read_text()
        if room.place in (S3, TIER):
            doors = [f"http://127.0.0.1:{door.port}" for door in stage.store.doors]
            found |= stage.store.environment() | {"CHAOS_ENDPOINTS": ",".join(doors)}
        if room.place == TIER:
            found["TRAINCKPT_TIERS"] = f"s3://{BUCKET}/{places.tier.name}"
        if room.bf16:
            found["CHAOS_BF16"] = "1"
        if room.trainer == rooms.SPLIT:
            found["CHAOS_SPLIT"] = "1"
        return found

    # ---- who is there

    def members(self) -> list[int]:
        """Every living process of the attempt; what the driver has begun itself is not."""
        new = set(launch.process_groups()) - self._known
        return sorted(pid for pid in new if launch.parent(pid) != os.getpid())

    def rank_pids(self) -> dict[int, int]:
        """The ranks that live."""
        if self._room.launcher == RANKS:
            return {r: p.pid for r, p in enumerate(self._processes) if launch.alive(p.pid)}
        found = {}
        for pid in self.members():
            rank, above = launch.variable(pid, "RANK"), launch.parent(pid)
            if rank is not None and above and launch.variable(above, "RANK") is None:
                found[int(rank)] = pid
        return found

    def criu_pids(self) -> list[int]:
        """CRIU, while it dumps or restores."""
        return [pid for pid in self.members() if self._name(pid) == "criu"]

    def _name(self, pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        except OSError:
            return ""

    def children(self, rank: int) -> list[int]:
        """Processes that a rank has started: loader workers, and what writes for it."""
        pid = self.rank_pids().get(rank)
        return [member for member in self.members() if pid and launch.parent(member) == pid]

    def launcher_pid(self) -> int:
        """`trainckpt run`."""
        return self._processes[0].pid

    def agent_pid(self) -> int | None:
        """The torchrun of `trainckpt run`."""
        parents = {launch.parent(pid) for pid in self.rank_pids().values()}
        return next(iter(parents - {None, 0, 1}), None)

    def codes(self) -> list[int | None]:
        """Exit codes of what was started here; None while it runs."""
        return [process.poll() for process in self._processes]

    # ---- what is done to them

    def signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            launch.send(pid, number)

    def kill(self) -> None:
        """Kill whoever is there."""
        until_s = time.monotonic() + 20
        while (members := self.members()) and time.monotonic() < until_s:
            self.signal(members, signal.SIGKILL)
            self.codes()
            time.sleep(0.005)

    def close(self) -> None:
        self.kill()
        os.close(self._out)
