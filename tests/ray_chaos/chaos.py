"""Chaos for Ray Train: a random sequence of events at random times, by its seed.

    kill worker      SIGKILL to one worker
    terminate        SIGTERM to one worker: Ray ends it
    freeze           SIGSTOP to one worker, for some seconds: a pause
    hang             SIGSTOP until Ray has begun again without it: then it goes on, unless Ray has
                     killed it
    kill saving      SIGKILL to one worker amid a save
    kill resuming    SIGKILL to one worker, and to one of its successors once they have begun
    drain            a node is announced to leave, and does
    remove           a node is gone, with its worker
    add              one more node
    kill driver      SIGKILL to the process that has called `fit`
    pause            `trainckpt pause`

After `drain` and `remove` a new node comes at once, or none where the number of workers may change.
A driver that has ended before the run is submitted again, with as many nodes as at first.

exact, same data       `tests.elastic.trace`; a resume is logged as what it is
refused as promised    for a while: one worker cannot go on with the order of several, where Ray's
                       own sampler is gone. The run is then ended by more workers, and every sample
                       trained once
failed                 all else: also a case that does not finish in time, or leaves a process
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import psutil

from tests.elastic import storm, trace
from tests.elastic.storm import Ended
from tests.ray_chaos.cluster import Nodes

if TYPE_CHECKING:
    from pathlib import Path

KILL, TERMINATE, FREEZE, HANG = "kill worker", "terminate", "freeze", "hang"
KILL_SAVING, KILL_RESUMING = "kill saving", "kill resuming"
DRAIN, REMOVE, ADD = "drain", "remove", "add"
KILL_DRIVER, PAUSE = "kill driver", "pause"
OF_WORKERS = (KILL, TERMINATE, FREEZE, HANG, KILL_SAVING, KILL_RESUMING)
EVENTS = (*OF_WORKERS, DRAIN, REMOVE, ADD, KILL_DRIVER, PAUSE)
REFUSED = "refused as promised"
ORDER = re.compile(r"StateMismatch: .*")
EPOCHS, SAMPLES, MOST = 2, 240, 3  # 1 to 3 workers share them equally, in whole windows
MAX_FAILURES = 6
EVENT_S = 3.0  # the longest pause before an event
TRAINS = 0.8  # the share of events that come once the workers train again after the one before
TRAINS_WITHIN_S = 60.0  # no longer: the event before may have left nobody
GRACE_S = 15.0  # of a drain
FINISH_S = 300.0  # from the last event to the end of the run
LEFT_S = 20.0
SUBMITS = 8


@dataclass(frozen=True)
class Event:
    """One of `EVENTS`, so many seconds after the one before, or after workers trained since.

    `pick` is uniform in [0, 1): which worker or node. `spare`: another node takes its place.
    """

    what: str
    trains: bool
    after_s: float
    pick: float
    spare: bool


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    nodes: int
    elastic: bool  # Ray may change the number of workers
    prepared: bool  # `prepare_data_loader` chooses the sampler, and none for one worker
    every: str
    events: tuple[Event, ...]

    @property
    def workers(self) -> int | list[int]:
        return [1, MOST] if self.elastic else self.nodes

    @property
    def words(self) -> str:
        number = "1 to 3 workers" if self.elastic else f"{self.nodes} workers"
        sampler = "Ray's sampler" if self.prepared else "own sampler"
        return f"{self.nodes} nodes, {number}, {sampler}, a save every {self.every}"


def draw(seed: int) -> Case:
    """The case of this seed."""
    random = Random(seed)
    elastic = random.random() < 0.5
    events = tuple(
        Event(
            random.choice(EVENTS),
            random.random() < TRAINS,
            random.uniform(0, EVENT_S),
            random.random(),
            random.random() < 0.5 or not elastic,
        )
        for _ in range(random.randint(2, 4))
    )
    return Case(
        seed,
        random.randint(1, MOST),
        elastic,
        random.random() < 0.3,
        random.choice(["1 step", "4 steps", "3 s"]),
        events,
    )


class Storm(storm.Storm):
    """One case as it runs."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder, self._trace = case, folder, folder / "trace"
        super().__init__(self._trace, trains_within_s=TRAINS_WITHIN_S, finish_s=FINISH_S)
        self._trace.mkdir(parents=True)
        self._run = folder / "storage/chaos/trainckpt"
        self._drivers: list[subprocess.Popen[bytes]] = []
        self._frozen: list[psutil.Process] = []

    def run(self, references: References) -> Ended:
        finished, left = self.finish()
        verdict, why = trace.FAILED, self.unfinished
        if left:
            why = f"left behind: {left}"
        elif finished:
            verdict, why = self._judge(references)
        return Ended(verdict, why, tuple(self.done))

    def finish(self) -> tuple[bool, list[str]]:
        """Whether the run was finished, and the processes that outlived its cluster."""
        if self._case.events:
            (self._trace / "slowly").touch()
        self._nodes = Nodes(self._folder, self._case.nodes)
        try:
            finished = self.drive(self._case.events)
            self._note("finished" if finished else "not finished")
        finally:
            left = self._close()
        return finished, left

    def said(self, most: int = 1_000_000) -> str:
        """What drivers and workers have printed."""
        texts = [
            f"--- {file.name}\n{file.read_text(errors='replace')[-most:]}"
            for file in sorted(self._folder.glob("driver*"))
        ]
        return "\n".join(texts)

    def calm(self) -> None:
        (self._trace / "slowly").unlink(missing_ok=True)
        if not self._nodes.staying:
            self._nodes.add()

    def go_on(self) -> bool | None:
        self._nodes.remove_drained()
        if self._drivers[-1].poll() is not None:
            if self._outcome() == "finished" and self._drivers[-1].returncode == 0:
                return True
            if len(self._drivers) == SUBMITS:
                return False
            self.submit()
        return None

    def submit(self) -> None:
        while len(self._nodes.staying) < self._case.nodes:
            self._nodes.add()
        if self._drivers:
            self._note(f"driver ended with {self._drivers[-1].returncode}")
        config = {
            "address": self._nodes.address,
            "name": "chaos",
            "storage": str(self._folder / "storage"),
            "trace": str(self._trace),
            "workers": self._case.workers,
            "prepared": self._case.prepared,
            "every": self._case.every,
            "epochs": EPOCHS,
            "samples": SAMPLES,
            "max_failures": MAX_FAILURES,
        }
        command = [sys.executable, "-m", "tests.ray_chaos.job", json.dumps(config)]
        with (self._folder / f"driver{len(self._drivers)}").open("wb") as said:
            self._drivers.append(subprocess.Popen(command, stdout=said, stderr=said))
        self._note(f"submitted, {len(self._nodes.staying)} nodes")

    # ---- events

    def happen(self, event: Event) -> None:
        what = event.what
        if what in OF_WORKERS:
            workers = self._workers(self._newest())
            what += f", of {len(workers)} workers"
            if workers:
                what += self._strike(event, workers, int(event.pick * len(workers)))
        elif what == KILL_DRIVER:
            self._drivers[-1].kill()
            self._drivers[-1].wait()
        elif what == PAUSE:
            command = [sys.executable, "-m", "trainckpt", "pause", str(self._run)]
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(command, capture_output=True, timeout=60, check=False)
                what += f", returned {done.returncode}"
        else:
            what += f", of {len(self._nodes.staying)} nodes"
            self._change_nodes(event)
        self._note(what)

    def _strike(self, event: Event, workers: list[psutil.Process], number: int) -> str:
        """Do what the event says to a worker; return more words on it."""
        worker, before = workers[number], self._newest()
        try:
            if event.what == TERMINATE:
                worker.terminate()
            elif event.what == FREEZE:
                worker.suspend()
                time.sleep(1 + 3 * event.pick)
                worker.resume()
            elif event.what == HANG:
                worker.suspend()
                self._frozen.append(worker)
                self.wait_for_attempt()
                worker.resume()
                return ", which goes on"
            elif event.what == KILL_SAVING:
                snapshot = self._uncommitted()
                worker.kill()
                return f", amid {snapshot}" if snapshot else ", amid no save"
            else:
                worker.kill()
        except psutil.NoSuchProcess:
            return ", which is gone"
        return self._kill_successor(before, event) if event.what == KILL_RESUMING else ""

    def _kill_successor(self, before: int, event: Event) -> str:
        until_s = time.monotonic() + TRAINS_WITHIN_S
        while time.monotonic() < until_s:
            if self._newest() > before and (workers := self._workers(self._newest())):
                with suppress(psutil.NoSuchProcess):
                    workers[int(event.pick * len(workers))].kill()
                return f", and attempt {self._newest()}, {self._state()}"
            time.sleep(0.005)
        return ", no successor"

    def _uncommitted(self) -> str | None:
        """A snapshot that is being written, once there is one."""
        until_s = time.monotonic() + EVENT_S
        while time.monotonic() < until_s:
            for folder in self._run.glob("snapshots/*"):
                if not (folder / "manifest.json").exists():
                    return folder.name
            time.sleep(0.001)
        return None

    def _change_nodes(self, event: Event) -> None:
        nodes = self._nodes
        number = int(event.pick * len(nodes.staying))
        if event.what == ADD:
            if len(nodes.staying) < MOST:
                nodes.add()
            return
        if nodes.staying and event.what == DRAIN:
            nodes.drain(nodes.staying[number], GRACE_S)
        elif nodes.staying:
            nodes.remove(nodes.staying[number])
        if event.spare:
            nodes.add()

    # ---- what there is

    def _note(self, what: str) -> None:
        self.note(what, self._newest())

    def _newest(self) -> int:
        """The newest attempt; 0: none."""
        records = self._run.glob("attempts/*.json")
        return max((int(record.stem) for record in records), default=0)

    def _record(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = json.loads((self._run / f"attempts/{self._newest()}.json").read_text())
            return found if isinstance(found, dict) else {}
        return {}

    def _outcome(self) -> str | None:
        return (self._record().get("outcome") or {}).get("outcome")

    def _state(self) -> str:
        return str(self._record().get("state"))

    def _workers(self, attempt: int) -> list[psutil.Process]:
        """The workers of an attempt that live."""
        found = []
        with suppress(OSError, ValueError):
            record = json.loads((self._run / f"attempts/{attempt}.json").read_text())
            for pid in record["pids"]:
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(pid))
        return found

    # ---- the end

    def _judge(self, references: References) -> tuple[str, str]:
        attempts, said = self.starts(), self.said()
        if wrong := trace.wrong_words(attempts, said):
            return trace.FAILED, wrong
        reference = references.of(attempts[-1].world, prepared=self._case.prepared)
        verdict, why = trace.verdict(attempts, EPOCHS, SAMPLES, reference)
        refused = set(ORDER.findall(said))
        if refused and verdict != trace.FAILED:
            promised = self._case.prepared and self._case.elastic
            return (REFUSED if promised else trace.FAILED), f"{sorted(refused)}; {why}"
        return verdict, why

    def _close(self) -> list[str]:
        """End the cluster; return the processes that outlive it."""
        for process in self._frozen:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        for driver in self._drivers:
            driver.kill()
            driver.wait()
        self._nodes.close()
        _, alive = psutil.wait_procs(self._nodes.processes(), LEFT_S)
        left = [" ".join(process.cmdline()) for process in alive if process.is_running()]
        for process in alive:
            process.kill()
        return left


class References:
    """What is kept of runs that were never stopped, by their number of workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[int, bool], dict[tuple[int, int], trace.Line]] = {}

    def of(self, world: int, *, prepared: bool) -> dict[tuple[int, int], trace.Line]:
        key = world, prepared
        if key not in self._known:
            case = Case(0, world, False, prepared, "1000 steps", ())
            straight = Storm(
                case, self._folder / f"reference{world}{'-prepared' if prepared else ''}"
            )
            assert straight.finish() == (True, []), straight.said(3000)
            (only,) = straight.starts()
            self._known[key] = trace.kept([only])
        return self._known[key]
