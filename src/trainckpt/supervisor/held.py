"""Memory of the ranks that the supervisor holds where /dev/shm is too small: it outlives them.

It is a memfd of each rank, with a link in the memory of its run (`tiers/memfd.py`). The supervisor
has it open, no more: it neither reads nor maps it. So the ranks of the next attempt find it, as
long as this process lives.

    held       when a rank hands it over (`lifecycle/run/held.py`)
    given up   when its link is gone: the rank, or `trainckpt prune`, has given it back
    at the end all of it, and the links
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.lifecycle.run.held import SOCKET
from trainckpt.snapshot import messages
from trainckpt.tiers import memfd
from trainckpt.tiers.memory import ARENAS, MemoryPlace
from trainckpt.tiers.private import is_private

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOK_S = 1.0
TALK_WITHIN_S = 5.0


class _Held(NamedTuple):
    """One memfd: the link at `path` says `target`."""

    path: Path
    target: memfd.Target


class HeldMemory:
    """Of all attempts that one supervisor launches. Sequence: `serving` around each, `close`."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    @contextlib.contextmanager
    def serving(self, folder: Path) -> Iterator[None]:
        """Hold what ranks hand over that are told of this folder; one that cannot be is not."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # such as a path too long: then nobody asks
                if memfd.is_available():
                    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    stack.enter_context(listener)
                    (folder / SOCKET).unlink(missing_ok=True)  # of before a dump
                    listener.bind(str(folder / SOCKET))
                    listener.listen()
                    ours, theirs = socket.socketpair()
                    stack.enter_context(theirs)
                    serve = threading.Thread(
                        target=self._serve, args=(listener, theirs), name="trainckpt-hold",
                        daemon=True,
                    )  # fmt: skip
                    serve.start()
                    stack.callback(serve.join)
                    stack.enter_context(ours)  # first: its end is what the thread waits for
            yield

    def close(self) -> None:
        """Nobody goes on from it."""
        held, self._held = self._held, []
        for each in held:
            os.close(each.target.descriptor)
        for root in {each.path.parent.parent for each in held}:
            MemoryPlace(root).sweep()

    def _serve(self, listener: socket.socket, until: socket.socket) -> None:
        with contextlib.ExitStack() as talks:
            while True:
                ready = select.select([listener, until], [], [], LOOK_S)[0]
                if until in ready:
                    return
                with contextlib.suppress(OSError, RuntimeError):  # no thread is to be had
                    if listener in ready:
                        end = listener.accept()[0]
                        talk = threading.Thread(
                            target=self._talk, args=(end,), name="trainckpt-hold", daemon=True
                        )
                        talk.start()  # apart: one that was stopped keeps nobody else waiting
                        talks.callback(talk.join)
                self._look()

    def _talk(self, end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):
            end.settimeout(TALK_WITHIN_S)
            self._take(end)

    def _take(self, end: socket.socket) -> None:
        """One memfd, from whoever has connected; what is none is not held."""
        with contextlib.suppress(EOFError, ValueError):
            message = messages.receive(end)
            if message.descriptor is None:
                return
            os.set_inheritable(message.descriptor, False)
            asked = _asked(message.body, message.descriptor)
            if asked is None:
                os.close(message.descriptor)
                return
            try:
                messages.send(end, {"process": os.getpid(), "descriptor": message.descriptor})
                end.recv(1)  # until the link is made, or its rank has died before
            finally:
                self._held.append(asked)  # from now on it is given up if there is no link

    def _look(self) -> None:
        """Give up what no link stands for any more."""
        for each in list(self._held):
            if memfd.read_link(each.path) != each.target:
                self._held.remove(each)
                os.close(each.target.descriptor)


def _asked(body: object, descriptor: int) -> _Held | None:
    """What is to be held, if it is memory for an arena."""
    said = body if isinstance(body, dict) else {}
    token, path = str(said.get("token")), Path(str(said.get("path")))
    ours = path.parent.name == ARENAS and is_private(path.parent.parent)
    if not (ours and memfd.is_named(descriptor, token)):
        return None
    return _Held(path, memfd.Target(token, os.getpid(), descriptor))
