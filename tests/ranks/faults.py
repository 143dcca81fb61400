"""Ranks over a store that dies: starts them, kills the host when one of them says so."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import NamedTuple

from tests.limits import HANG_S
from tests.ranks import fault_programs
from tests.ranks.processes import context


class Ended(NamedTuple):
    """How a rank ended: exit code, boundaries passed by then, the count it published, and what
    was left of the time.
    """

    code: int
    passed: int | None = None
    published: int | None = None
    seconds_left: float | None = None


class _Rank:
    def __init__(self, program, rank, size, port, arguments):
        self.pipe, there = context.Pipe()
        given = (there, program, rank, size, port, arguments)
        self.process = context.Process(target=_be_a_rank, args=given, daemon=True)
        self.process.start()
        there.close()
        self.facts = ()
        self.asks = None


class Run:
    """Ranks and the host of their store.

    Attributes:
        ended: In the order of ranks.
        seconds: From the host's death to the end of the last rank.
    """

    def __init__(self, program, size, *arguments, signal_all=False):
        """Args: signal_all: SIGTERM to every rank once the host is dead, as launchers do."""
        self._signal_all = signal_all
        self._died_s = None
        self._host, port = _start_host()
        self._ranks = [_Rank(program, rank, size, port, arguments) for rank in range(size)]
        try:
            self._serve()
        finally:
            for process in (self._host, *(rank.process for rank in self._ranks)):
                process.kill()
        self.ended = [Ended(rank.process.exitcode, *rank.facts) for rank in self._ranks]

    def _serve(self):
        until_s = time.monotonic() + HANG_S
        open_ = {rank.pipe: rank for rank in self._ranks}
        while open_:
            ready = wait(list(open_), timeout=max(0.0, until_s - time.monotonic()))
            assert ready, f"{len(open_)} ranks have not ended within {HANG_S} s"
            for pipe in ready:
                rank = open_[pipe]
                try:
                    self._hear(rank, pipe.recv())
                except EOFError:
                    del open_[pipe]
                    rank.process.join(HANG_S)
                self._answer_where_all_ask(list(open_.values()))
        self.seconds = None if self._died_s is None else time.monotonic() - self._died_s

    def _hear(self, rank, message):
        what, *facts = message
        if what == "ended":
            rank.facts = facts
        elif what == "kill the host":
            self._kill_host()
            rank.pipe.send("it is dead")
        else:
            rank.asks = what

    def _answer_where_all_ask(self, ranks):
        """A barrier that needs no store: everybody here asks the same."""
        asked = {rank.asks for rank in ranks}
        if not ranks or len(asked) > 1 or None in asked:
            return
        if asked == {"all are there, kill the host"}:
            self._kill_host()
        for rank in ranks:
            rank.asks = None
            rank.pipe.send("go on")

    def _kill_host(self):
        if self._died_s is None:
            self._host.kill()
            self._host.join(HANG_S)
            self._died_s = time.monotonic()
            for rank in self._ranks if self._signal_all else ():
                rank.process.terminate()  # SIGTERM; nothing where it has ended


def _start_host():
    here, there = context.Pipe(duplex=False)
    host = context.Process(target=fault_programs.hold_a_store, args=(there,), daemon=True)
    host.start()
    assert here.poll(HANG_S)
    return host, here.recv()


def _be_a_rank(pipe, program, rank, size, port, arguments):
    program(fault_programs.Boss(pipe), rank, size, port, *arguments)
