"""Gate: what CRIU has restored waits behind it until this process has said that it may go on.

CRIU runs a script once every process of the tree is there, each standing where it was dumped. If
the script fails, CRIU ends them all. Ours asks here, through a pipe, and waits for the answer in
another one; if this process dies, that is an answer too: no.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# CRIU has inherited the pipes, and keeps them from what it runs; hence its folder in /proc.
_SCRIPT = """#!/bin/sh
test "$CRTOOLS_SCRIPT_ACTION" = post-restore || exit 0
echo >/proc/$PPID/fd/{asked}
read -r answer </proc/$PPID/fd/{answer}
test "$answer" = go
"""


class Gate:
    """Around one call of CRIU.

    Attributes:
        theirs: Descriptors that CRIU is to inherit.
        script: What it is to run, for `--action-script`.
    """

    def __init__(self, images: Path) -> None:
        """`images`: the script lies there where programs cannot lie in the temporary folder."""
        self._places = (Path(tempfile.gettempdir()), images)
        self._open = set[int]()
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Gate:
        place = next((each for each in self._places if _may_run_programs(each)), None)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory("", "trainckpt-gate-", place))
            self._asked, asked = self._pipe()
            answer, self._answer = self._pipe()
            self.theirs = (asked, answer)
            self.script = Path(folder) / "ask"
            self.script.write_text(_SCRIPT.format(asked=asked, answer=answer), encoding="utf-8")
            self.script.chmod(0o700)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close(*self._open)
        self._closing.close()

    def attend(self, may_go: Callable[[], object]) -> bool:
        """Wait until CRIU asks, and let the tree go on unless `may_go` raises.

        Returns:
            Whether CRIU asked; False: it ended before.
        """
        self._close(*self.theirs)
        try:
            asked = bool(os.read(self._asked, 1))
            if asked:
                may_go()
                with contextlib.suppress(BrokenPipeError):  # CRIU has ended meanwhile
                    os.write(self._answer, b"go\n")
        finally:
            self._close(self._answer)
        return asked

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def _close(self, *descriptors: int) -> None:
        for each in descriptors:
            if each in self._open:
                self._open.remove(each)
                os.close(each)


def _may_run_programs(folder: Path) -> bool:
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC
