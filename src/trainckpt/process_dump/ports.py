"""TCP and UDP ports that a restored tree needs: it listens and is connected where it was.

While it is away the system gives its ports to whoever asks for any. A connection that was closed
keeps its port for a minute more (TIME_WAIT, include/net/tcp.h), so they are waited for.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

NET = "/proc/{}/net/{}"
TABLES = ("tcp", "tcp6", "udp", "udp6")
FREE_WITHIN_S = 75.0  # the minute, and until somebody has looked
LOOK_EVERY_S = 0.2
ASK_AGAIN_S = 2.0
LISTEN, TIME_WAIT = 0x0A, 0x06
MOST_NAMED = 3


def bound(pid: int, inodes: Collection[str]) -> list[int]:
    """Ports of the sockets with these inodes, in the network that process `pid` is in."""
    return sorted({port for port, _, inode in _sockets(pid) if inode in inodes and port})


class Waiting:
    """Waits for the ports of one tree, 75 s in all, and says so once."""

    def __init__(self, name: str, ports: Collection[int], say: Callable[[str], object]) -> None:
        self._name, self._ports, self._say = name, ports, say
        self._until: float | None = None

    def may_be_free(self) -> bool:
        """Wait until nobody has them, 2 s at most: others may have them at other addresses for
        good. False: that was long enough.
        """
        now = time.monotonic()
        if self._until is None:
            self._until = now + FREE_WITHIN_S
            who = who_has(self._ports)
            why = f": {who}" if who else ""
            self._say(f"{self._name} waits up to {FREE_WITHIN_S:.0f} s for its ports{why}")
        if now >= self._until:
            return False
        again = min(now + ASK_AGAIN_S, self._until)
        time.sleep(LOOK_EVERY_S)
        while _used(self._ports) and time.monotonic() < again:
            time.sleep(LOOK_EVERY_S)
        return True


def who_has(ports: Collection[int]) -> str:
    """Which of them are in use here, and as what; "" if none is."""
    found = sorted(_used(ports).items())
    named = ", ".join(f"{port} ({_as_what(states)})" for port, states in found[:MOST_NAMED])
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"port {named}{more} in use" if found else ""


def _as_what(states: Collection[int]) -> str:
    if LISTEN in states:
        return "a program listens there"
    if {*states} == {TIME_WAIT}:
        return "a closed connection's, for up to a minute"
    return "a connection's"


def _used(ports: Collection[int]) -> dict[int, set[int]]:
    """Port -> states of the sockets that have it."""
    found = dict[int, set[int]]()
    for port, state, _ in _sockets("self"):
        if port in ports:
            found.setdefault(port, set()).add(state)
    return found


def _sockets(pid: int | str) -> Iterator[tuple[int, int, str]]:
    """Port, state and inode of each socket."""
    for table in TABLES:
        with contextlib.suppress(OSError):
            text = Path(NET.format(pid, table)).read_text(encoding="ascii")
            for line in text.splitlines()[1:]:
                fields = line.split()
                yield int(fields[1].rpartition(":")[2], 16), int(fields[3], 16), fields[9]
