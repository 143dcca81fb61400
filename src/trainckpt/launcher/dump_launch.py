"""Launch a command so that its processes can be dumped: no io_uring, no terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.launcher.dumps import Dumping, DumpTarget
from trainckpt.launcher.output_relay import OutputRelay
from trainckpt.process_dump import no_io_uring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.launcher.processes import Process
    from trainckpt.launcher.record import NamedRun
    from trainckpt.process_dump.criu import Ability

FILTER = str(Path(no_io_uring.__file__))


@dataclass(frozen=True)
class Dumpable:
    """Facts for a supervisor that may dump its processes.

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
        program = command[0] if "/" not in command[0] else str(Path(cwd or ".") / command[0])
        if self.keep_io_uring or shutil.which(program, path=path) is None:
            return list(command)
        return [sys.executable, "-I", "-S", FILTER, *command]

    def dumping(
        self, process: Process, folder: Path, logs: OutputRelay | None, named: NamedRun | None
    ) -> Dumping | None:
        """Return the dumper of this launch; None if its output does not go through files."""
        if logs is None:
            return None
        return Dumping(DumpTarget(process, folder, logs.paths, named), self.ability, self.say)


@contextlib.contextmanager
def outputs(
    dumpable: Dumpable | None, folder: Path, output: Any, *, apart: bool = False
) -> Iterator[OutputRelay | None]:
    """The files to which a command prints while the block runs; None: to where it always did."""
    if dumpable is None or output not in (None, sys.stderr):
        yield None
        return
    logs = OutputRelay(folder, out_to=1 if output is None else 2, apart=apart)
    try:
        with logs.followed():
            yield logs
    finally:
        logs.close()
