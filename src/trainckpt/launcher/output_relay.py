"""Relay a command's output through files: a process without terminal or pipe can be dumped.

The command appends to one file for each of this process's outputs (one for both, if they are the
same), and a thread here copies new bytes to them. Copied bytes are given back to the file system,
so weeks of output take no room. A restored command goes on appending to the same paths.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from trainckpt.storage.libc import libc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUT, ERR = "out.log", "err.log"
LOOK_S = 0.05
PIECE_BYTES = 1 << 16
GIVE_BACK_BYTES = 16 << 20
KEEP_SIZE, PUNCH_HOLE = 1, 2


class OutputRelay:
    """The outputs of one launch: `out` and `err` are descriptors for the command, of `paths`."""

    def __init__(
        self, folder: Path, *, out_to: int = 1, err_to: int = 2, apart: bool = False
    ) -> None:
        """Open the files in `folder`; they are copied to these descriptors of this process.

        `apart`: two files in any case, for a command that may have been launched with two.
        """
        files = [(folder / OUT, out_to)]
        if apart or not _is_same(out_to, err_to):
            files.append((folder / ERR, err_to))
        self.paths = tuple(path for path, _ in files)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        opened = [os.open(path, flags, 0o600) for path in self.paths]
        self.out, self.err = opened[0], opened[-1]
        self._followed = [_Tail(path, target) for path, target in files]
        self._stopping = threading.Event()

    def close(self) -> None:
        """Close this process's ends; the command has them now."""
        for descriptor in {self.out, self.err}:
            os.close(descriptor)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Copy the output while the block runs, to the last byte."""
        sys.stdout.flush()
        thread = threading.Thread(target=self._follow, name="trainckpt-logs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

    def _follow(self) -> None:
        while not self._stopping.wait(LOOK_S):
            for tail in self._followed:
                tail.copy()
        for tail in self._followed:
            tail.copy()
            tail.close()


class _Tail:
    """One file, read from its end at the time of opening."""

    def __init__(self, path: Path, target: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._at = self._given_back = os.fstat(self._file).st_size
        self._target = target

    def copy(self) -> None:
        while piece := os.pread(self._file, PIECE_BYTES, self._at):
            self._at += len(piece)
            with contextlib.suppress(OSError):  # the output has no reader; the command goes on
                view = memoryview(piece)
                while view:
                    view = view[os.write(self._target, view) :]
        if self._at - self._given_back >= GIVE_BACK_BYTES:
            # Without support by the file system the bytes stay.
            num_bytes = self._at - self._given_back
            libc().fallocate(self._file, KEEP_SIZE | PUNCH_HOLE, self._given_back, num_bytes)
            self._given_back = self._at

    def close(self) -> None:
        os.close(self._file)


def _is_same(one: int, other: int) -> bool:
    """Return True if two descriptors lead to one file, so that the order of lines must be kept."""
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False
