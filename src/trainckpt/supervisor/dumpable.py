"""How a command is launched so that its processes can be dumped: no io_uring, no terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.process_dump import no_io_uring
from trainckpt.supervisor.dumping import Dumping, Launch
from trainckpt.supervisor.logs import Logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.process_dump.criu import Ability
    from trainckpt.supervisor.adopted import Process
    from trainckpt.supervisor.record import NamedRun

FILTER = str(Path(no_io_uring.__file__))


@dataclass(frozen=True)
class Dumpable:
    """What a supervisor that may dump needs to know.

    Attributes:
        ability: What CRIU can do here, and why it cannot.
        say: Told what happens, a line at a time.
        keep_io_uring: Launch without the filter, and most likely without a dump.
    """

    ability: Ability
    say: Callable[[str], object]
    keep_io_uring: bool = False

    def command(self, command: Sequence[str], cwd: str | None, path: str | None) -> list[str]:
        """The command under the filter; as it is where it cannot be started, for the error's sake.

        Args:
            command: What to execute.
            cwd, path: Working directory and PATH of the command.
        """
        first = command[0] if "/" not in command[0] else str(Path(cwd or ".") / command[0])
        if self.keep_io_uring or shutil.which(first, path=path) is None:
            return list(command)
        return [sys.executable, "-I", "-S", FILTER, *command]

    def dumping(
        self, process: Process, folder: Path, logs: Logs | None, named: NamedRun | None
    ) -> Dumping | None:
        """Who dumps what was launched; None: its output goes elsewhere."""
        if logs is None:
            return None
        return Dumping(Launch(process, folder, logs.paths, named), self.ability, self.say)


@contextlib.contextmanager
def outputs(
    dumpable: Dumpable | None, folder: Path, output: Any, *, apart: bool = False
) -> Iterator[Logs | None]:
    """The files to which a command prints while the block runs; None: to where it always did."""
    if dumpable is None or output not in (None, sys.stderr):
        yield None
        return
    logs = Logs(folder, out_to=1 if output is None else 2, apart=apart)
    try:
        with logs.followed():
            yield logs
    finally:
        logs.close()
