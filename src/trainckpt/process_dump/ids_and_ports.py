"""Process ids, thread ids and TCP and UDP ports that a restored tree needs again.

The system assigns ids in order. If it is about to reach reserved ids, `pass_over` moves it past
them. This needs the same privilege as CRIU (CAP_CHECKPOINT_RESTORE).

While the tree is away the system may assign its ports to other sockets. A closed connection keeps
its port for one more minute (TIME_WAIT, include/net/tcp.h), so a restore waits for the ports.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.process_dump import process_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

LAST, END = Path("/proc/sys/kernel/ns_last_pid"), Path("/proc/sys/kernel/pid_max")
AHEAD = 4096  # over a minute of new processes on a busy machine: 50 per second were seen
TABLES = ("tcp", "tcp6", "udp", "udp6")
FREE_WITHIN_S = 75.0  # TIME_WAIT's minute, and some time to notice its end
LOOK_EVERY_S = 0.2
ASK_AGAIN_S = 2.0
LISTEN, TIME_WAIT = 0x0A, 0x06
MOST_NAMED = 3


def pass_over(numbers: Iterable[int]) -> None:
    """Keep processes started in the next moments from these ids, if permitted."""
    with contextlib.suppress(OSError, ValueError):
        last_pid = int(LAST.read_text(encoding="ascii"))
        next_pid = turn_after(last_pid, numbers, int(END.read_text(encoding="ascii")))
        if next_pid != last_pid:
            LAST.write_text(str(next_pid), encoding="ascii")


def turn_after(last: int, numbers: Iterable[int], end: int, ahead: int = AHEAD) -> int:
    """Return the id to count on from after `last`, with none of `numbers` within the next `ahead`.

    Pure. At `end`, counting starts over. If `numbers` leave no such room, the rest are in reach.
    """
    for number in sorted(numbers, key=lambda each: (each - last) % end):
        if (number - last) % end > ahead:
            break
        last = number
    return last


def bound(pid: int, inodes: Collection[str]) -> list[int]:
    """Return the ports of the sockets with these inodes, in process `pid`'s network namespace."""
    return sorted({port for port, _, inode in _sockets(pid) if inode in inodes and port})


class PortWait:
    """Wait for the ports of one tree, 75 s in all, with one message."""

    def __init__(self, name: str, ports: Collection[int], say: Callable[[str], object]) -> None:
        self._name, self._ports, self._say = name, ports, say
        self._until: float | None = None

    def may_be_free(self) -> bool:
        """Wait until the ports are free, for 2 s at most; return False once the 75 s are over.

        Other programs may use the same ports at other addresses for good, so the caller tries
        anyway.
        """
        now = time.monotonic()
        if self._until is None:
            self._until = now + FREE_WITHIN_S
            holders = who_has(self._ports)
            reason = f": {holders}" if holders else ""
            self._say(f"{self._name} waits up to {FREE_WITHIN_S:.0f} s for its ports{reason}")
        if now >= self._until:
            return False
        ask_again_at = min(now + ASK_AGAIN_S, self._until)
        time.sleep(LOOK_EVERY_S)
        while _used(self._ports) and time.monotonic() < ask_again_at:
            time.sleep(LOOK_EVERY_S)
        return True


def who_has(ports: Collection[int]) -> str:
    """Return a sentence about the ports in use here; "" if none is."""
    used_ports = sorted(_used(ports).items())
    port_texts = ", ".join(
        f"{port} ({_as_what(states)})" for port, states in used_ports[:MOST_NAMED]
    )
    rest_text = f" and {len(used_ports) - MOST_NAMED} more" if len(used_ports) > MOST_NAMED else ""
    return f"port {port_texts}{rest_text} in use" if used_ports else ""


def _as_what(states: set[int]) -> str:
    if LISTEN in states:
        return "a program listens there"
    return (
        "a closed connection's, for up to a minute" if states == {TIME_WAIT} else "a connection's"
    )


def _used(ports: Collection[int]) -> dict[int, set[int]]:
    """Return port -> states of its sockets."""
    states_by_port = dict[int, set[int]]()
    for port, state, _ in _sockets("self"):
        if port in ports:
            states_by_port.setdefault(port, set()).add(state)
    return states_by_port


def _sockets(pid: int | str) -> Iterator[tuple[int, int, str]]:
    """Yield port, state and inode of each socket."""
    for fields in process_tree.socket_rows(pid, TABLES):
        yield int(fields[1].rpartition(":")[2], 16), int(fields[3], 16), fields[9]
