"""Train a run whose attempts are killed when it is known, and print how long it took.

    python -m benchmarks.planning.killed_run RUN SPECIFICATION

One process imports everything and forks a process for each attempt: a restart takes about a second.
The attempts are whole: they claim a number, are killed by SIGKILL, restore and save.

The specification is JSON: `steps` to train; `step_s` that a step waits besides its arithmetic;
`features` of the square layer that is trained, whose state has 8 bytes for each weight; `every` as
the option; either `kills_s`, seconds since the beginning, or `kills_after`, steps that an attempt
has trained; and `timed_saves` to take at the end. The last line is JSON: `wall_s`; `killed_s`, the
moments of the kills; and `commit_s`, the mean time from a boundary to the commit of a timed save.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import fsspec  # noqa: F401 - as below
import numpy.random  # noqa: F401
import psutil  # noqa: F401
import torch
import torch._dynamo  # an optimizer would import it in each attempt, which takes seconds

import trainckpt
import trainckpt.start_attempt

POLL_S = 0.002


@dataclass(frozen=True)
class Specification:
    """See the module's header."""

    steps: int
    step_s: float
    features: int
    every: str
    kills_s: tuple[float, ...] = ()
    kills_after: tuple[int, ...] = ()
    timed_saves: int = 0


class KilledRun:
    """One run and its attempts."""

    def __init__(self, run: str, specification: Specification) -> None:
        self._run, self._spec = run, specification
        shared = memoryview(mmap.mmap(-1, 16))
        self._trained = shared[:8].cast("q")  # steps of the attempt
        self._commit_s = shared[8:].cast("d")  # of all timed saves
        self._killed_s: list[float] = []
        self._begun_s = time.monotonic()

    def go(self) -> dict[str, Any]:
        """Run to the end, with all kills."""
        process, ended = self._fork(), False
        for kill_s in self._spec.kills_s:
            ended = ended or self._wait(process, until_s=self._begun_s + kill_s)
            process = process if ended else self._restart(process)
        for steps in self._spec.kills_after:
            ended = ended or self._wait(process, until_steps=steps)
            process = process if ended else self._restart(process)
        if not ended:
            self._wait(process)
        found = {"wall_s": time.monotonic() - self._begun_s, "killed_s": self._killed_s}
        return {**found, "commit_s": self._commit_s[0] / max(1, self._spec.timed_saves)}

    def _restart(self, process: int) -> int:
        os.kill(process, signal.SIGKILL)
        self._killed_s.append(time.monotonic() - self._begun_s)
        os.waitpid(process, 0)
        return self._fork()

    def _fork(self) -> int:
        self._trained[0] = 0
        process = os.fork()
        if process == 0:
            code = 1
            try:
                self._attempt()
                code = 0
            finally:
                os._exit(code)
        return process

    def _wait(
        self, process: int, until_s: float | None = None, until_steps: int | None = None
    ) -> bool:
        """Wait; return True if the attempt has ended meanwhile."""
        while True:
            if until_s is not None and time.monotonic() >= until_s:
                return False
            if until_steps is not None and self._trained[0] >= until_steps:
                return False
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0, "an attempt has failed by itself"
                return True
            time.sleep(POLL_S)

    def _attempt(self) -> None:
        logging.getLogger("trainckpt").setLevel(logging.WARNING)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        spec = self._spec
        model = torch.nn.Linear(spec.features, spec.features, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        batch = torch.ones(1, spec.features)
        with trainckpt.Checkpointer(
            self._run, model=model, optimizer=optimizer, every=spec.every
        ) as ckpt:
            while ckpt.cursor.step < spec.steps + spec.timed_saves:
                handle = ckpt.save() if ckpt.cursor.step >= spec.steps else None
                begun_s = time.monotonic()
                ckpt.boundary()
                if handle is not None:
                    handle.wait("local")
                    self._commit_s[0] += time.monotonic() - begun_s
                model(batch).sum().backward()
                time.sleep(spec.step_s)
                optimizer.step()
                optimizer.zero_grad()
                self._trained[0] += 1


if __name__ == "__main__":
    body = json.loads(sys.argv[2])
    print(json.dumps(KilledRun(sys.argv[1], Specification(**body)).go()))
