"""One job: so many ranks, so many bytes, one kind of training; every system takes its turn.

    round     the floors; then a turn of each system, in an order that moves on by one each round
    turn      begin; a few saves that are not counted; pairs of windows, the one with the save now
              first, now second; a save with nothing beside it; end; restore into a training that
              was just built, which the next turn goes on with

A window is so many steps, `save` being asked for before the first. What is restored must be what
was saved, byte for byte.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from benchmarks.compare import systems
from benchmarks.compare.caches import evict, forget_peak, give_back
from benchmarks.compare.floors import Floors
from benchmarks.compare.lowest import LowestAvailable
from benchmarks.compare.together import slowest, timed
from benchmarks.compare.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.compare.systems.base import Pending, System

WARM_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """Settings of one job: steps of a `window`, `pairs` of them a turn, sequences of a `batch`."""

    gigabytes: float
    compute: str
    step_s: float
    device: str
    systems: tuple[str, ...]
    rounds: int
    pairs: int
    window: int
    batch: int = 1
    restores: bool = True


@dataclass
class Samples:
    """What was measured of one system; seconds.

    Attributes:
        plain, saved: Windows without and with a save, until the last step was done.
        settled: Windows with a save, until it was fsynced too, if it was not by then.
        gpu_plain, gpu_saved: GPU memory that torch allocated at most in such windows, bytes.
        host: Host memory that a turn took at most, bytes.
    """

    plain: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    settled: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    durable_training: list[float] = field(default_factory=list)
    restore_cold: list[float] = field(default_factory=list)
    restore_memory: list[float] = field(default_factory=list)
    gpu_plain: list[int] = field(default_factory=list)
    gpu_saved: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class Job:
    """One rank's part of a job. `note` is called after each pair of windows and each turn."""

    def __init__(self, plan: Plan, folder: Path, note: Callable[[Job], object]) -> None:
        self.plan, self.folder, self.rank, self._note = plan, folder, dist.get_rank(), note
        self.samples = {name: Samples() for name in plan.systems}
        self.floors: list[dict[str, float]] = []
        self.left_out: dict[str, str] = {}
        self.training = self._new()
        self.num_bytes = self.training.num_bytes
        self._floors = Floors(self.training, folder)

    def _new(self, *, fresh: bool = False) -> Training:
        plan = self.plan
        return Training(
            plan.gigabytes, plan.compute, plan.step_s, plan.device, batch=plan.batch, fresh=fresh
        )

    def measure(self) -> None:
        """Measure all rounds."""
        for number in range(self.plan.rounds):
            self.floors.append(self._floors.measure(self.training))
            self._say(number, "floors", f"{self.floors[-1]}")
            names = self.plan.systems[number % len(self.plan.systems) :]
            names += self.plan.systems[: len(self.plan.systems) - len(names)]
            for name in names:
                if name not in self.left_out:
                    self._try(number, name)
                    self._note(self)

    def _try(self, number: int, name: str) -> None:
        """A turn; a system that fails in it is left out from now on, on all ranks."""
        folder, problem = self.folder / f"{name}-{number}", None
        begun = time.perf_counter()
        try:
            self._turn(systems.load(name)(folder), self.samples[name])
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its reason
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            self.training = self._new()
        if slowest(float(problem is not None)):
            self.left_out[name] = problem or "failed on another rank"
            self.samples.pop(name, None)
            self._say(number, name, f"left out: {self.left_out[name]}")
            return
        self._say(number, name, f"{time.perf_counter() - begun:.1f} s")

    def _turn(self, system: System, samples: Samples) -> None:
        give_back()
        forget_peak()
        with LowestAvailable() as available:
            expected = self._trained(system, samples)
        samples.host.append(available.taken_bytes)
        if self.plan.restores:
            self._restore(system, samples, expected)
        self._on_rank_0(system.discard)

    def _trained(self, system: System, samples: Samples) -> str:
        """All of a turn before the restore; the digest of what was saved last."""
        system.begin(self.training)
        self._train(system, WARM_STEPS)
        for _ in range(system.warm_saves):
            pending = system.save()
            self._train(system, WARM_STEPS, pending)
            pending.wait()
            self._on_rank_0(system.forget)
        for number in range(self.plan.pairs):
            for saves in (False, True) if number % 2 else (True, False):
                self._window(system, samples, saves=saves)
            self._note(self)
        dist.barrier()
        begun = time.perf_counter()
        pending = system.save_now()
        samples.durable.append(slowest(pending.wait() - begun))
        expected = self.training.digest() if self.plan.restores else ""
        system.end()
        return expected

    def _train(self, system: System, steps: int, pending: Pending | None = None) -> None:
        """So many steps; more, if a save that was asked for has not been taken by then."""
        while steps > 0 or (pending is not None and not pending.taken()):
            system.boundary()
            self.training.step(system.fence)
            steps -= 1
        self.training.wait_for_device()

    def _window(self, system: System, samples: Samples, *, saves: bool) -> None:
        """Train one window, and note how long it took, and the GPU memory."""
        self.training.forget_peak()
        if not saves:
            samples.plain.append(timed(lambda: self._train(system, self.plan.window)))
            samples.gpu_plain.append(self.training.peak_bytes())
            return
        dist.barrier()
        begun = time.perf_counter()
        pending = system.save()
        self._train(system, self.plan.window, pending)
        trained = time.perf_counter()
        durable = pending.wait()
        settled = time.perf_counter()
        samples.gpu_saved.append(self.training.peak_bytes())
        samples.saved.append(slowest(trained - begun))
        samples.settled.append(slowest(settled - begun))
        samples.durable_training.append(slowest(durable - begun))
        self._on_rank_0(system.forget)

    def _restore(self, system: System, samples: Samples, expected: str) -> None:
        """Where a system can, from memory; then from disk. No cache helps, nor freed memory."""
        for memory in (True, False) if system.remembers else (False,):
            del self.training
            give_back()
            if not memory:
                self._on_rank_0(system.empty_memory)
            self._on_rank_0(partial(evict, system.folder))
            self.training = self._new(fresh=True)
            before = bytes_read()
            seconds = timed(partial(self._restored, system, memory=memory))
            system.restored()
            if self.training.digest() != expected:
                raise AssertionError("what was restored is not what was saved")
            if memory and slowest(bytes_read() - before) > self.num_bytes / 10:
                self._tell("it was to be read from memory, and was read from the disk")
                continue
            (samples.restore_memory if memory else samples.restore_cold).append(seconds)

    def _restored(self, system: System, *, memory: bool) -> None:
        system.restore(self.training, memory=memory)
        self.training.touch()

    def _on_rank_0(self, act: Callable[[], object]) -> None:
        dist.barrier()
        if self.rank == 0:
            act()
        dist.barrier()

    def _say(self, number: int, name: str, what: str) -> None:
        self._tell(f"round {number + 1} of {self.plan.rounds}: {name}: {what}")

    def _tell(self, what: str) -> None:
        if self.rank == 0:
            print(what, file=sys.stderr, flush=True)


def bytes_read() -> int:
    """Bytes that this process has had read from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def start(device: str, threads: int) -> str:
    """Join the other ranks; returns the device to train on."""
    torch.set_num_threads(threads)
    logging.getLogger("trainckpt").setLevel(logging.WARNING)
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        dist.init_process_group("gloo")
        return "cpu"
    alone = dist.is_nccl_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    dist.init_process_group("cpu:gloo,cuda:nccl" if alone else "gloo")
    place = f"cuda:{dist.get_node_local_rank(0) % torch.cuda.device_count()}"
    torch.cuda.set_device(place)
    return place


def leave() -> NoReturn:
    """Leave the other ranks, and end: what peers still run must not keep the process.

    Nor may the interpreter be taken down while gloo's thread still lets go of the last collective's
    tensors: torch 2.13 aborts then ("terminate called without an active exception").
    """
    with suppress(Exception):
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
