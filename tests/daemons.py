"""Servers that tests start: children of this process, in the foreground, each known by its id.

What cannot start says why, with the last lines of its log. Nothing is ended by a name, and whatever
was started is ended by `stop`, in the opposite order.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

END_S = 20.0
LOOK_S = 0.2
# What a test run, an outer Slurm or an outer torchrun sets.
STRANGE = ("SLURM", "SBATCH", "TRAINCKPT", "PYTEST", "TORCHELASTIC")


class CannotStart(Exception):
    """A server does not run here; says what was tried and what its log says."""


class Daemons:
    """Programs that run until they are ended, each with a log in `folder`.

    Args:
        start_s: How long all of them may take until they are up.
        variables: Beside those of `clean_environment`.
        cwd: Where they run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start_s: float,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._folder, self._start_s, self._cwd = folder, start_s, cwd
        self._environment = {**clean_environment(), **(variables or {})}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._processes

    def start(self, name: str, program: str | Path, *words: str) -> None:
        """Start a program of the search path, or at a path, as `name`.

        Raises:
            CannotStart: it is not installed.
        """
        path = shutil.which(program, path=search_path())
        if path is None:
            raise CannotStart(f"{program} is not installed")
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [path, *words],
                cwd=self._cwd,
                env=self._environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def until(self, name: str, condition: Callable[[], bool]) -> None:
        """Wait for what `name` has to do.

        Raises:
            CannotStart: one has ended, or it takes too long.
        """
        until = time.monotonic() + self._start_s
        while not condition():
            for daemon, process in self._processes.items():
                if process.poll() is not None:
                    code = process.returncode
                    raise CannotStart(f"{daemon} ended with {code}:\n{self.said(daemon)}")
            if time.monotonic() > until:
                said = self.said(name)
                raise CannotStart(f"not up after {self._start_s:.0f} s; {name}:\n{said}")
            time.sleep(LOOK_S)

    def said(self, name: str, lines: int = 30) -> str:
        """The end of a log."""
        path = self._folder / f"{name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def send(self, name: str, signum: signal.Signals) -> None:
        self._processes[name].send_signal(signum)

    def stop(self) -> None:
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


def search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def clean_environment() -> dict[str, str]:
    """Ours, without what is `STRANGE`."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(STRANGE)}
    return {**kept, "PATH": search_path()}


def free_ports(number: int) -> list[int]:
    """Below those the system hands out by itself, so that they stay free until they are used."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            if port not in found:
                found.append(port)
    return found


def wait_for(condition: Callable[[], object], limit_s: float, say: Callable[[], str] = str) -> None:
    """Until `condition` holds; an AssertionError with `say()` if it does not in so many seconds."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, say()
        time.sleep(LOOK_S)
