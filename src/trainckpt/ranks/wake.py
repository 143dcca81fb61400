"""A descriptor that one thread sleeps on and any other can make readable.

Floor 1. Uses: nothing of ours. Used by: ranks.watcher.
"""

from __future__ import annotations

import contextlib
import socket


class Wake:
    """A pair of sockets that never block. Calls after `close` do nothing."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Readable after `ring`, until `drain`."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Any thread."""
        with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
            self._writer.send(b"\0")

    def drain(self) -> None:
        """The sleeping thread."""
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Once nobody sleeps on it."""
        self._reader.close()
        self._writer.close()
