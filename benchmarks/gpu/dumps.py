"""Stage F: a training is dumped and restored; and the driver's part of that alone.

driver     a process that counts in GPU memory is locked, checkpointed, restored, unlocked, and
           counts on; with NVML open in it too, as trainckpt's own watcher has it
training   programs/train.py, DDP by gloo in a world of one, under `trainckpt run`, `pause
           --dump`, `resume`: its trace must be that of a run that was left alone. Where the
           kernel has no CRIU, only the first part
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.process_dump import criu, gpu_state
from trainckpt.process_dump.cuda_driver import CudaDriver

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.findings import Findings

PROGRAMS = Path(__file__).parent / "programs"
CLI = [sys.executable, "-m", "trainckpt"]
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
LOCK_MS, POLL_S, COUNTS_WITHIN_S = 10_000, 0.02, 40.0
SHOWN_CHARACTERS, MICRO_BATCHES = 1200, 120


def run(findings: Findings, device: Any, folder: Path, ends: float) -> None:
    """Run both parts."""
    training = Training(findings, device, folder, ends)
    for watched in (False, True):
        name = "driver_beside_nvml" if watched else "driver"
        if not device.on_card:
            with CudaDriver() as driver:
                findings.needs_card(name, driver.machine().why_not)
            continue
        with findings.attempt(name):
            driver_alone(findings, folder / name, name, watched=watched)
    with findings.attempt("training"):
        training.dump_and_restore()


def driver_alone(findings: Findings, folder: Path, name: str, *, watched: bool) -> None:
    """Set the GPU state of a process aside and put it back."""
    folder.mkdir()
    command = [sys.executable, str(PROGRAMS / "counting.py"), "cuda", *["--nvml"] * watched]
    log = folder / "log"
    with (
        log.open("wb") as output,
        CudaDriver() as driver,
        subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        ) as process,
    ):
        try:
            counted(process, log, 3)
            seconds = {}
            for call in ("lock", "checkpoint", "restore", "unlock"):
                arguments = (LOCK_MS,) if call == "lock" else ()
                begun = time.perf_counter()
                getattr(driver, call)(process.pid, *arguments)
                seconds[call] = round(time.perf_counter() - begun, 4)
                if call == "checkpoint":
                    holders = gpu_state.holders([process.pid])
            findings.add(f"{name}_seconds", seconds, "s")
            free = not holders
            goal, passed = ("", None) if watched else ("no device file stays open", free)
            findings.add(f"{name}_lets_go", free, goal=goal, passed=passed)
            counted(process, log, 3)
            findings.add(name, value=True, goal="counts on", passed=True)
        finally:
            process.kill()


def counted(process: subprocess.Popen[bytes], log: Path, more: int) -> None:
    """Wait until the process has counted on."""
    wanted = len(log.read_bytes().splitlines()) + more
    wait_for(
        lambda: len(log.read_bytes().splitlines()) >= wanted or process.poll() is not None,
        COUNTS_WITHIN_S,
    )
    if process.poll() is not None:
        raise RuntimeError(f"it ended with {process.returncode}: {log.read_text()[-500:]}")


class Training:
    """The training, started at once: once left alone, once to be dumped."""

    def __init__(self, findings: Findings, device: Any, folder: Path, ends: float) -> None:
        self._findings, self._folder, self._ends = findings, folder, ends
        self._device, self._slow = device, folder / "slow"
        self._why_not = criu.examine().why_not
        if not self._why_not:
            self._slow.touch()
            straight = self._script("straight")
            dumped = [*self._script("dumped"), "--slow", str(self._slow)]
            self._straight = self._start("straight", [sys.executable, *straight], **ALONE)
            self._dumped = self._start("dumped", [*CLI, "run", "--nproc", "1", "--", *dumped])

    def dump_and_restore(self) -> None:
        """Dump it after some micro-batches, resume it, and compare the traces."""
        if self._why_not:
            self._findings.add("training", None, why=f"no CRIU here: {self._why_not}")
            return
        trace, place = self._folder / "dumped/trace/rank0.txt", str(self._folder / "dumped/run")
        self._wait(lambda: trace.exists() and len(trace.read_text().splitlines()) >= 4)
        begun = time.perf_counter()
        pause = subprocess.run(
            [*CLI, "pause", "--json", "--dump", place], capture_output=True, text=True, check=False
        )
        self._findings.add("pause_seconds", time.perf_counter() - begun, "s")
        if pause.returncode != 0:
            raise RuntimeError(f"pause --dump: {pause.stdout}{pause.stderr}{self._said('dumped')}")
        kind = json.loads(pause.stdout)["kind"]
        self._findings.add("kind", kind, goal="dump", passed=kind == "dump", why=pause.stderr)
        self._wait(lambda: self._dumped.poll() is not None)
        self._slow.unlink()
        before = len(trace.read_text().splitlines())
        begun = time.perf_counter()
        resumed = self._start("resumed", [*CLI, "resume", place])
        self._wait(lambda: resumed.poll() is not None)
        self._findings.add("resume_to_end_seconds", time.perf_counter() - begun, "s")
        restored = "restored dump" in self._said("resumed")
        why = "" if restored else self._said("resumed")
        self._findings.add("restored", restored, goal="the dump", passed=restored, why=why)
        self._wait(lambda: self._straight.poll() is not None)
        expected = (self._folder / "straight/trace/rank0.txt").read_text()
        same = trace.read_text() == expected
        self._findings.add("lines_before_the_dump", before)
        why = "" if same else f"{trace.read_text()}\n{expected}"
        self._findings.add("training", same, goal="the same trace", passed=same, why=why)

    def _script(self, name: str) -> list[str]:
        folder = self._folder / name
        return [
            str(PROGRAMS / "train.py"),
            "--run",
            str(folder / "run"),
            "--trace",
            str(folder / "trace"),
            "--device",
            self._device.kind,
            "--micro-batches",
            str(MICRO_BATCHES),
            "--backend",
            "gloo",
        ]

    def _start(self, name: str, command: list[str], **more: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **more},
                start_new_session=True,
            )

    def _said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-SHOWN_CHARACTERS:]

    def _wait(self, condition: Callable[[], bool]) -> None:
        try:
            wait_for(condition, self._ends - 2.0 - time.monotonic())
        except TimeoutError as error:
            said = "".join(self._said(path.stem) for path in self._folder.glob("*.log"))
            raise TimeoutError(f"not within the stage's time: {said}") from error


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    """Return when it holds.

    Raises:
        TimeoutError: it did not within the limit.
    """
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= until:
            raise TimeoutError
        time.sleep(POLL_S)
