"""An S3 server that can be killed and begun again, behind proxies that hold, delay and refuse."""

from __future__ import annotations

import signal
from itertools import cycle
from typing import TYPE_CHECKING

from tests import s3_servers
from tests.faults.s3_proxy import proxy

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path


class TroubledStore:
    """The server, and the doors to it.

    Attributes:
        doors: Proxies; each rank may have one of its own.
        between: The first of them.
    """

    def __init__(self, folder: Path, stack: ExitStack, doors: int = 1) -> None:
        self._folder, self._stack = folder, stack
        self._running = stack.enter_context(s3_servers.rclone(folder))
        self.doors = [stack.enter_context(proxy(self._running.port)) for _ in range(doors)]
        self.between = self.doors[0]

    @property
    def pid(self) -> int:
        """The process of the server that runs now."""
        return self._running.process.pid

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return how a client finds the server, by the first door unless a port is given."""
        return self._running.environment(port or self.between.port)

    def killed(self) -> None:
        self._running.process.kill()
        self._running.process.wait()
        self.reset()

    def begun_again(self) -> None:
        self._running = self._stack.enter_context(s3_servers.rclone(self._folder))
        for door in self.doors:
            door.behind = self._running.port

    def stopped(self) -> None:
        self._running.process.send_signal(signal.SIGSTOP)
        self.reset()

    def continued(self) -> None:
        self._running.process.send_signal(signal.SIGCONT)

    def refusing(self, *codes: int) -> None:
        turn = cycle(codes)
        self.between.reset(lambda _: next(turn))

    def reset(self) -> None:
        for door in self.doors:
            door.reset()
