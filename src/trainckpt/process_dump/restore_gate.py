"""Gate for a restored tree: it waits until this process lets it run.

CRIU runs a script once every process of the tree exists, each stopped where it was dumped. If the
script fails, CRIU ends them all. The script asks this process through a pipe and waits for the
answer on another pipe. If this process dies, the answer is no.

The script is a file in memory, so no folder with executable files is needed and nothing remains.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_EVERY_S = 1.0
TRY_WITHIN_S = 10.0
_CLOSED_ON_EXEC, _MAY_RUN = 0x1, 0x10  # MFD_CLOEXEC; MFD_EXEC, since Linux 6.3
# CRIU inherits the pipes but closes them in the script, so the script opens them through /proc.
_SCRIPT = """#!/bin/sh
test "$CRTOOLS_SCRIPT_ACTION" = post-restore || exit 0
echo >/proc/$PPID/fd/{asked} || exit 1
read -r answer </proc/$PPID/fd/{answer}
test "$answer" = go
"""


class RestoreGate:
    """Gate for one call of CRIU, as a context.

    Attributes:
        theirs: Descriptors for CRIU to inherit.
        script: Path for `--action-script`; valid while this process lives.
    """

    def __enter__(self) -> RestoreGate:
        """Make pipes and script; raise OSError if the system cannot."""
        with contextlib.ExitStack() as stack:
            self._open = set[int]()
            stack.callback(lambda: self._close(*self._open))
            self._asked, asked_end = self._opened(*os.pipe())
            answer, self._answer = self._opened(*os.pipe())
            self.theirs = (asked_end, answer)
            text = _SCRIPT.format(asked=asked_end, answer=answer)
            (script,) = self._opened(_program("trainckpt-gate", text.encode()))
            self.script = f"/proc/{os.getpid()}/fd/{script}"
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def attend(self, process: subprocess.Popen[bytes], may_go: Callable[[], object]) -> bool:
        """Wait until CRIU asks, and let the tree run unless `may_go` raises.

        Returns:
            True if CRIU asked; False if it ended before.
        """
        self._close(*self.theirs)
        try:
            is_asked = self._is_asked(process)
            if is_asked:
                may_go()
                with contextlib.suppress(BrokenPipeError):  # CRIU has ended
                    os.write(self._answer, b"go\n")
        finally:
            self._close(self._answer)
        return is_asked

    def _is_asked(self, process: subprocess.Popen[bytes]) -> bool:
        poller = select.poll()
        poller.register(self._asked, select.POLLIN)
        while not poller.poll(1000 * LOOK_EVERY_S):
            # Partly restored processes may have the other end open, and outlive CRIU.
            if process.poll() is not None:
                return False
        return bool(os.read(self._asked, 1))

    def _opened(self, *descriptors: int) -> tuple[int, ...]:
        self._open.update(descriptors)
        return descriptors

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)


def why_not() -> str:
    """Return the reason against a gate here, or "", after a trial."""
    try:
        with RestoreGate() as gate:
            completed = subprocess.run(
                [gate.script], capture_output=True, text=True, timeout=TRY_WITHIN_S, check=False
            )
    except (OSError, subprocess.SubprocessError) as error:
        return f"CRIU could ask nothing: {error}"
    return f"CRIU could ask nothing: {completed.stderr.strip()}" if completed.returncode else ""


def _program(name: str, text: bytes) -> int:
    """Return a read-only descriptor of a program in memory; executing it requires no writers."""
    try:
        descriptor = os.memfd_create(name, _CLOSED_ON_EXEC | _MAY_RUN)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create(name, _CLOSED_ON_EXEC)
    try:
        os.write(descriptor, text)
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
