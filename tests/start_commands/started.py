"""One start of a command, and the run it works on: what is seen from outside, and what was said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from tests.campaign import launch
from tests.campaign.cases import Settings
from tests.limits import HANG_S
from tests.start_commands.pace import SLOW
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.campaign.launch import Server
    from trainckpt.format.attempt_record import AttemptRecord

ROOT = launch.ROOT
EXAMPLE = str(ROOT / "tests" / "start_commands" / "paced.py")
STEPS = 20  # 60 micro-batches


class Run:
    """A run of the example: its place, its trace, its command's arguments."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.place = str(folder / "run")
        self.settings = Settings(
            "char_gpt", "ddp" if ranks > 1 else "none", ranks, 3, 2, 0.1, 10, 4
        )
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def argv(self) -> list[str]:
        flags = self.settings.argv(self.place, str(self.folder / "trace"))
        flags[flags.index("--steps") + 1] = str(STEPS)
        return flags

    def trace(self, rank: int) -> bytes:
        file = self.folder / "trace" / f"rank{rank}.jsonl"
        return file.read_bytes() if file.exists() else b""

    def trained(self) -> int:
        """Micro-batches of the last rank."""
        return self.trace(self.ranks - 1).count(b"\n")

    def record(self, attempt: int) -> AttemptRecord:
        return attempt_history.read_attempts(open_directory(self.place))[attempt]

    def pids(self) -> list[int]:
        """Of the newest attempt's ranks."""
        records = attempt_history.read_attempts(open_directory(self.place))
        return records[max(records)].facts["pids"]

    def assert_stopped(self, attempt: int) -> None:
        """All ranks at one micro-batch, and that place saved."""
        outcome = self.record(attempt).outcome
        assert (outcome["outcome"], outcome["exit_code"]) == ("stopped", 75), outcome
        assert outcome["lost_micro_batches"] == 0, outcome
        places = set()
        for rank in range(self.ranks):
            last = json.loads(self.trace(rank).splitlines()[-1])
            places.add(last["step"] * 3 + last["micro"] + 1)
        (reached,) = places
        step, micro = divmod(reached, 3)
        name = f"s{step}m{micro}" if micro else f"s{step}"
        assert outcome["snapshot"].startswith(f"{name}~{attempt}.")

    def assert_exact(self, straight: Run) -> None:
        """Every stop was in order: no line is there twice, and none differs."""
        for rank in range(self.ranks):
            assert self.trace(rank) == straight.trace(rank)
            final = f"trace/final{rank}.json"
            assert (self.folder / final).read_bytes() == (straight.folder / final).read_bytes()


class Command:
    """A command in a process group of its own; what it says goes to a file."""

    def __init__(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                list(command),
                env=launch.environment() | (variables or {}),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def codes(self) -> list[int | None]:
        return [self._process.poll()]

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Whatever is left of it."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class Forks:
    """Processes of one script, forked from the warm server, each with variables of its own."""

    def __init__(
        self,
        server: Server,
        script: str,
        argv: Sequence[str],
        log: Path,
        variables: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        self._server, self.log = server, log
        ranks = [dict(each) for each in variables]
        answer = server.ask(script=script, argv=list(argv), log=str(log), ranks=ranks)
        self.pids: list[int] = answer["pids"]

    @property
    def pid(self) -> int:
        return self.pids[0]

    def codes(self) -> list[int | None]:
        return self._server.ask(poll=self.pids)["codes"]

    def said(self) -> str:
        files = sorted(self.log.parent.glob(f"{self.log.name}.rank*"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def kill(self) -> None:
        for pid, code in zip(self.pids, self.codes(), strict=True):
            if code is None:
                launch.send(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def ended(started: Command | Forks) -> list[int | None]:
    """Its exit codes, once all have one."""
    try:
        wait_for(lambda: None not in started.codes())
    finally:
        started.kill()
    return started.codes()


def stop(started: Command | Forks, run: Run, act: Callable[[], None], more: int = 5):
    """Call `act` once `run` has trained so many more micro-batches; the exit codes."""
    wanted = run.trained() + more
    slow = run.folder / SLOW
    slow.touch()

    def trained() -> bool:
        assert None in started.codes(), started.said()
        return run.trained() >= wanted

    try:
        wait_for(trained)
        act()
        return ended(started)
    finally:
        slow.unlink()
        started.kill()


def sigterm(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
