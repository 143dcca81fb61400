"""A file system that goes wrong at the n-th call: `python -m tests.chaos.disk FOLDER BACKING`.

A line of JSON on standard input is the trouble from now on, `null` for none; a line on standard
output answers it, with the number of calls that the trouble before has hit:

    {"kinds": ["write", "sync"], "errno": 28, "first": 3, "times": 1}    the third such call only
    {"kinds": ["write"], "delay_s": 0.02, "first": 1, "times": null}     each of them, until told
    {"without": ["link"]}                                                no trouble: it has none
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.faults import refusing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = {  # by the kernel's numbers
    **dict.fromkeys((1, 3, 17, 27, 28), "look"),
    **dict.fromkeys((4, 9, 10, 11, 12, 13, 35, 45), "change"),
    14: "open",
    15: "read",
    16: "write",
    43: "write",
    20: "sync",
    30: "sync",
}
WRITES = ("change", "write", "sync")
ALL = ("look", "change", "open", "read", "write", "sync")
OPEN_FILE = 14
CALLS = {"link": 13}


class Disk(refusing.Server):
    """Passes everything on, but for what the trouble of the moment hits."""

    trouble: dict[str, Any] | None = None
    seen = hits = 0
    lacks: frozenset[int] = frozenset()

    def look_at(self, flags: int, end: int) -> None:
        """O_DIRECT is no trouble here."""

    def answer(self, opcode: int, node: int, body: memoryview) -> tuple[int, bytes]:
        if opcode in self.lacks:
            return errno.EPERM, b""
        trouble, kind = self.trouble, KINDS.get(opcode)
        if trouble is not None and self._concerns(trouble, kind, opcode, body):
            self.seen += 1
            last = trouble["first"] + (trouble["times"] or sys.maxsize)
            if trouble["first"] <= self.seen < last:
                self.hits += 1
                time.sleep(trouble.get("delay_s", 0.0))
                if trouble.get("errno"):
                    return trouble["errno"], b""
        return super().answer(opcode, node, body)

    def _concerns(
        self, trouble: dict[str, Any], kind: str | None, opcode: int, body: memoryview
    ) -> bool:
        if opcode == OPEN_FILE and trouble.get("errno") == errno.EROFS:
            return bool(int.from_bytes(body[:4], "little") & os.O_ACCMODE)
        return kind in trouble["kinds"]

    def serve(self, kernel: int) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        super().serve(kernel)

    def _listen(self) -> None:
        for line in sys.stdin:
            hits = self.hits
            self.seen = self.hits = 0
            told = json.loads(line)
            if told and "without" in told:
                self.lacks = frozenset(CALLS[name] for name in told["without"])
            else:
                self.trouble = told
            print(hits, flush=True)


class Mounted:
    """The driver's end of a mounted disk.

    Attributes:
        folder: Where it is mounted.
        backing: Where its bytes lie; nothing goes wrong there.
        pid: The process that serves it.
    """

    def __init__(self, folder: Path, backing: Path, server: Any) -> None:
        self.folder, self.backing, self.pid = folder, backing, server.pid
        self._server = server

    def set(self, trouble: dict[str, Any] | None) -> int:
        """Let this go wrong from now on; return how many calls the trouble before has hit."""
        return self._tell(trouble)

    def without(self, calls: list[str]) -> None:
        """Let it be a file system that has none of these calls."""
        self._tell({"without": calls})

    def _tell(self, words: dict[str, Any] | None) -> int:
        self._server.stdin.write(json.dumps(words).encode() + b"\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


@contextmanager
def mounted(folder: Path, backing: Path) -> Iterator[Mounted]:
    """A disk in `folder`, for as long as the block lasts."""
    with refusing.mounted(folder, backing, __name__) as server:
        yield Mounted(folder, backing, server)


if __name__ == "__main__":
    refusing.serve(Disk)
