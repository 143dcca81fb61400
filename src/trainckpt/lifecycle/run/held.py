"""Has the supervisor hold memory that is to outlive this rank: it is handed a memfd, and keeps it.

It listens on a socket in the folder that it named in TRAINCKPT_SUPERVISOR, which only this user can
enter; nothing listens on a network. One connection for each memfd:

    rank         {"token", "path"}              with the descriptor
    supervisor   {"process", "descriptor"}      as which it has it; it hangs up on what is no memfd
    rank         hangs up when it has made the link: from now on it is held as long as that is there
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.told import folder_of_launch
from trainckpt.snapshot import messages
from trainckpt.tiers import memfd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainckpt.tiers.memory import Hold

SOCKET = "hold"
ANSWER_WITHIN_S = 10.0


def holder() -> Hold | None:
    """By which memory is held; None where nobody would."""
    folder = folder_of_launch()
    path = folder / SOCKET if folder else None
    if path is None or not path.is_socket() or not memfd.is_available():
        return None

    @contextlib.contextmanager
    def hold(descriptor: int, token: str, link: Path) -> Iterator[memfd.Target]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(ANSWER_WITHIN_S)
            end.connect(str(path))
            try:
                messages.send(end, {"token": token, "path": str(link)}, descriptor=descriptor)
                told = messages.receive(end).body
                target = memfd.Target(token, int(told["process"]), int(told["descriptor"]))
            except (EOFError, ValueError, KeyError, TypeError) as error:
                raise OSError(f"the supervisor did not take it ({error!r})") from error
            yield target

    return hold
