"""Gate: what CRIU has restored waits behind it until this process has said that it may go on.

CRIU runs a script once every process of the tree is there, each standing where it was dumped. If
the script fails, CRIU ends them all. Ours asks here, through a pipe, and waits for the answer in
another one; if this process dies, that is an answer too: no.

The script is a file without a place, so it needs no folder in which programs may lie, and nothing
is left of it.
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
# CRIU has inherited the pipes, and keeps them from what it runs; hence its folder in /proc.
_SCRIPT = """#!/bin/sh
test "$CRTOOLS_SCRIPT_ACTION" = post-restore || exit 0
echo >/proc/$PPID/fd/{asked} || exit 1
read -r answer </proc/$PPID/fd/{answer}
test "$answer" = go
"""


class Gate:
    """Around one call of CRIU.

    Attributes:
        theirs: Descriptors that CRIU is to inherit.
        script: What it is to run, for `--action-script`; there as long as this process is.
    """

    def __enter__(self) -> Gate:
        """Raises OSError where there can be none."""
        with contextlib.ExitStack() as stack:
            self._open = set[int]()
            stack.callback(lambda: self._close(*self._open))
            self._asked, asked = self._opened(*os.pipe())
            answer, self._answer = self._opened(*os.pipe())
            self.theirs = (asked, answer)
            text = _SCRIPT.format(asked=asked, answer=answer)
            (script,) = self._opened(_program("trainckpt-gate", text.encode()))
            self.script = f"/proc/{os.getpid()}/fd/{script}"
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def attend(self, process: subprocess.Popen[bytes], may_go: Callable[[], object]) -> bool:
        """Wait until CRIU asks, and let the tree go on unless `may_go` raises.

        Returns:
            Whether CRIU asked; False: it ended before.
        """
        self._close(*self.theirs)
        try:
            asked = self._is_asked(process)
            if asked:
                may_go()
                with contextlib.suppress(BrokenPipeError):  # CRIU has ended meanwhile
                    os.write(self._answer, b"go\n")
        finally:
            self._close(self._answer)
        return asked

    def _is_asked(self, process: subprocess.Popen[bytes]) -> bool:
        asks = select.poll()
        asks.register(self._asked, select.POLLIN)
        while not asks.poll(1000 * LOOK_EVERY_S):
            # What CRIU had begun to restore may hold the other end, and outlive it.
            if process.poll() is not None:
                return False
        return bool(os.read(self._asked, 1))

    def _opened(self, *descriptors: int) -> tuple[int, ...]:
        self._open.update(descriptors)
        return descriptors

    def _close(self, *descriptors: int) -> None:
        for each in descriptors:
            if each in self._open:
                self._open.remove(each)
                os.close(each)


def why_not() -> str:
    """Why no gate can be made here, or "": tried."""
    try:
        with Gate() as gate:
            done = subprocess.run(
                [gate.script], capture_output=True, text=True, timeout=TRY_WITHIN_S, check=False
            )
    except (OSError, subprocess.SubprocessError) as error:
        return f"CRIU could ask nothing: {error}"
    return f"CRIU could ask nothing: {done.stderr.strip()}" if done.returncode else ""


def _program(name: str, text: bytes) -> int:
    """A descriptor, for reading, of a program that has no place: nobody may be writing to it."""
    try:
        made = os.memfd_create(name, _CLOSED_ON_EXEC | _MAY_RUN)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        made = os.memfd_create(name, _CLOSED_ON_EXEC)
    try:
        os.write(made, text)
        return os.open(f"/proc/self/fd/{made}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made)
