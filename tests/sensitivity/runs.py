"""Runs of `script.py` for the proof: straight, stopped once inside a window, resumed and broken.

Ranks are forked from the campaign's warm server. The stop is shared by all breaks of a setting:
each resumes a copy of the same stopped run, since what is broken is the way back alone.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaign import launch
from tests.limits import HANG_S
from trainckpt.launcher.supervise import RunResult
from trainckpt.prove.compare import read_records
from trainckpt.run_directory.run_url import PROVE_VARIABLE, open_directory
from trainckpt.snapshot.attempt_history import read_attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.prove.compare import Record

SCRIPT = Path(__file__).with_name("script.py")
SAVED = 75
STOP_AT = {1: 14, 3: 5}  # micro-batches: inside a window of the second epoch


@dataclass
class Setting:
    """One command line, run straight and stopped; each is done when it is first asked for.

    Attributes:
        world: Ranks.
        flags: Of the script, besides --break.
    """

    server: launch.Server
    folder: Path
    world: int
    flags: tuple[str, ...] = ()
    _straight: Mapping[int, Record] | None = None
    _stopped: Mapping[int, Record] | None = None

    @property
    def stop_at(self) -> int:
        """Micro-batches trained before the stop."""
        return STOP_AT[self.world]

    @property
    def straight(self) -> Mapping[int, Record]:
        """Records of the uninterrupted run."""
        if self._straight is None:
            self._straight = self.launch("straight", "run-straight", expect=0)
        return self._straight

    @property
    def stopped(self) -> Mapping[int, Record]:
        """Records up to the stop."""
        if self._stopped is None:
            strike = {"at": self.stop_at, "signal": "SIGTERM", "rank": self.world - 1}
            self._stopped = self.launch("stopped", "run-stopped", strike=strike, expect=SAVED)
        return self._stopped

    def resumed(self, broken: str) -> Mapping[int, Record]:
        """Records of going on from the stop to the end, with one kind of state not restored."""
        _ = self.stopped
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.folder / "run-stopped", run)
        return self.launch(broken.replace(" ", "-"), "run", "--break", broken, expect=0)

    def launch(
        self, records: str, run: str, *flags: str, expect: int, strike: Mapping[str, Any] = {}
    ) -> Mapping[int, Record]:
        """Run every rank to its end; the records it left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = {"dir": str(self.folder / records), "place": str(self.folder / run)}
        variables = {PROVE_VARIABLE: json.dumps({**plan, "strike": strike})}
        log = self.folder / f"{records}.log"
        answer = self.server.ask(
            script=str(SCRIPT),
            argv=[*self.flags, *flags],
            log=str(log),
            ranks=[{**variables, **ranks} for ranks in self._rank_variables()],
        )
        codes = wait(self.server, answer["pids"])
        logs = [path.read_text() for path in sorted(self.folder.glob(f"{log.name}.rank*"))]
        assert set(codes) == {expect}, f"{codes}\n" + "\n".join(logs)
        return read_records(self.folder / records)

    def _rank_variables(self) -> Sequence[dict[str, str]]:
        if self.world == 1:
            return [{}]
        port, world = launch.free_port(), str(self.world)
        return [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(self.world)
        ]


def wait(server: launch.Server, pids: Sequence[int]) -> Sequence[int]:
    """Exit codes of all; where one failed, the others are killed, as torchrun would do."""
    until = time.monotonic() + HANG_S
    while True:
        codes = server.ask(poll=pids)["codes"]
        if None not in codes:
            return codes
        if time.monotonic() > until or any(code not in (None, 0, SAVED) for code in codes):
            for pid, code in zip(pids, codes, strict=True):
                if code is None:
                    launch.send(pid, launch.signal.SIGKILL)
        time.sleep(0.02)


def warm(server: launch.Server) -> Callable[..., RunResult]:
    """In place of `supervise`: the one process of a proof without torchrun, forked."""

    def run(command: Sequence[str], *, environment: dict, output: Any, **_: Any) -> RunResult:
        script, argv = command[1], list(command[2:])
        answer = server.ask(script=script, argv=argv, log=output.name, ranks=[environment])
        (code,) = wait(server, answer["pids"])
        place = open_directory(json.loads(environment[PROVE_VARIABLE])["place"])
        records = read_attempts(place)
        return RunResult(code, records[max(records)])

    return run
