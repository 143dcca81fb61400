"""Ranks whose store dies: what each of them does, and the process that holds the store.

Faults fall at named moments, not after sleeps: a rank's channel stops at a call of its watcher,
has the store's host killed, and goes on once it is dead.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

from torch.distributed import TCPStore

from tests.limits import HANG_S
from tests.ranks.programs import Training, terminate_myself
from trainckpt.errors import NoAgreement
from trainckpt.notice import Notice
from trainckpt.preemption import SignalSource
from trainckpt.ranks import BoundaryGate, NoticeWatcher, RankStore, World

AHEAD = 500


class Moment(NamedTuple):
    """Before or after one call of a channel, whose key ends so."""

    when: str
    verb: str
    key: str


DECIDED = Moment("after", "decided", "")


class Boss:
    """The test, as its ranks see it. Any thread may talk to it."""

    def __init__(self, pipe):
        self._pipe = pipe
        self._talking = threading.Lock()

    def ask(self, *message):
        """Say something, and wait for the answer."""
        with self._talking:
            self._pipe.send(message)
            return self._pipe.recv()

    def end(self, code, *facts):
        """Say how this rank ended, and end it; the first word stands."""
        with self._talking:
            self._pipe.send(("ended", *facts))
            os._exit(code)


class Interrupted(RankStore):
    """A channel that has something done at a moment; connections share that."""

    def __init__(self, channel, moment, act):
        self.world = channel.world
        self._channel, self._moment, self._act = channel, moment, act

    def put(self, key, value):
        return self._call("put", key, value)

    def put_all(self, values):
        self._at("before", "put_all", min(values))
        self._channel.put_all(values)
        self._at("after", "put_all", min(values))

    def peek(self, key):
        return self._channel.peek(key)

    def peek_all(self, keys):
        return self._channel.peek_all(keys)

    def propose(self, key, value):
        return self._call("propose", key, value)

    def count(self, key, by=1):
        return self._call("count", key, by)

    def wait(self, key, timeout_s):
        return self._channel.wait(key, timeout_s)

    def connection(self):
        return Interrupted(self._channel.connection(), self._moment, self._act)

    def _call(self, verb, key, value):
        self._at("before", verb, key)
        result = getattr(self._channel, verb)(key, value)
        self._at("after", verb, key)
        return result

    def _at(self, when, verb, key):
        if self._moment and (when, verb) == self._moment[:2] and key.endswith(self._moment.key):
            self._act()


class Noting(BoundaryGate):
    """Remembers what was published for the first round, None: nothing; and knows one moment."""

    published = None

    def __init__(self, when_decided):
        super().__init__()
        self._when_decided = when_decided

    def decided(self, decision):
        super().decided(decision)
        self._when_decided()

    def open_round(self, round_):
        count = super().open_round(round_)
        self.published = count if self.published is None else self.published
        return count


class Rank:
    """One rank without a process group: it passes boundaries, and ends as its owner would."""

    def __init__(self, boss, rank, size, port, moment=None, act=None):
        self.boss, self.rank = boss, rank
        store = TCPStore("127.0.0.1", port, is_master=False)
        channel = RankStore(World(rank, size, rank, "here"), store, "test/1/").connection()
        act = act or self.kill_the_host
        if moment is not None:
            channel = Interrupted(channel, moment, act)
        self.gate = Noting(act if moment == DECIDED else lambda: None)
        self.watcher = NoticeWatcher(
            self.gate, channel, [SignalSource()], on_failed_stop=lambda _: self.end_with_71()
        )
        self.watcher.start()
        boss.ask("watching")

    def kill_the_host(self):
        """Go on once the process that holds the store is dead."""
        self.boss.ask("kill the host")

    def boundary(self):
        """What is due; 71 where the ranks cannot agree."""
        try:
            return self.gate.at_boundary()
        except NoAgreement:
            return self.end_with_71()

    def end_with_71(self):
        """The failed stop, from whichever thread learns of it."""
        self.boss.end(71, self.gate.passed, self.gate.published)

    def stop_here(self, *facts):
        """A stop is due: leave in order, as far as the store allows."""
        self.watcher.publish_final()
        self.watcher.stop()
        self.boss.end(0, self.gate.passed, self.gate.published, *facts)


def train_until_stopped(boss, rank, size, port, moment, signalled):
    """The signalled rank asks for a stop after its third micro-batch."""
    here = Rank(boss, rank, size, port, moment)
    while (due := here.boundary()) is None:
        if rank == signalled and here.gate.passed == 3:
            here.watcher.request(Notice("SIGTERM"))
    assert due.notice.action == "stop"
    here.stop_here()


def stop_and_then_lose_the_store(boss, rank, size, port):
    """The store dies when every rank knows what is due."""
    here = Rank(boss, rank, size, port)
    while here.boundary() is None:
        if rank == 1 and here.gate.passed == 3:
            here.watcher.request(Notice("SIGTERM"))
    boss.ask("all are there, kill the host")
    here.stop_here()


def train_without_a_store(boss, rank, size, port):
    """The store dies unasked; boundaries are passed until a stop is asked for."""
    here = Rank(boss, rank, size, port)
    assert here.boundary() is None
    boss.ask("all are there, kill the host")
    here.watcher._threads[1].join(HANG_S)  # the listener ends when it finds the store gone
    assert here.watcher.problems
    for _ in range(100):
        assert here.boundary() is None
    boss.ask("all are there")
    terminate_myself()
    while here.boundary() is None:
        pass
    os._exit(1)


def stop_with_two_deadlines(boss, rank, size, port, deadlines):
    """Ranks 0 and 1 get notices at once: no publication leaves before both have theirs."""
    is_told = rank < len(deadlines)
    held = Moment("before", "put", f"1/of/{rank}") if is_told else None
    here = Rank(boss, rank, size, port, held, lambda: boss.ask("both have been told"))
    if is_told:
        here.watcher.request(Notice("spot", seconds_left=deadlines[rank]))
    else:
        boss.ask("both have been told")
    while (due := here.boundary()) is None:
        pass
    here.stop_here(due.notice.seconds_left)


def train_unevenly(rank, told):
    """Rank 0 runs far ahead of rank 2; then one of them is signalled."""
    training = Training()
    channel = training.channel.connection()
    while training.boundary():
        if rank == 0 and training.gate.passed == AHEAD:
            channel.put("rank 0 is far ahead", True)
        if rank == 2 and training.gate.passed == 1:
            channel.get("rank 0 is far ahead", HANG_S)
        if rank == told and training.gate.passed == {0: AHEAD, 2: 1}[told]:
            terminate_myself()
    return training.leave()


def hold_a_store(pipe):
    """Until killed."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    threading.Event().wait()
