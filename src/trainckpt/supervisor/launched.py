"""One launch, from its start to its end: signals are delivered, lost ranks noticed, time kept.

The main thread sleeps until something comes: a signal, or the end of the launched process, which
a thread of its own waits for. Twice a second it looks at what the ranks have told. What is to be
done is decided in `orders`; here it is done.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.lifecycle.run.told import imported, namespace_of, read_told
from trainckpt.supervisor import grace, nested, orders, verdict
from trainckpt.supervisor.dumping import Wish
from trainckpt.supervisor.orders import Rank
from trainckpt.supervisor.processes import (
    child_above,
    children,
    handles,
    is_ours,
    kill_all,
    seen_from_here,
    send,
    started,
)
from trainckpt.supervisor.report import End, read_ends
from trainckpt.supervisor.requests import write_notice
from trainckpt.supervisor.signals import ENDED
from trainckpt.supervisor.verdict import Course

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainckpt.lifecycle.run.told import Told
    from trainckpt.supervisor.adopted import Process
    from trainckpt.supervisor.dumping import Dumping
    from trainckpt.supervisor.record import NamedRun
    from trainckpt.supervisor.signals import Inbox

LOOK_S = 0.5
NOBODY = 2**30  # no kernel gives a process this number


class Launched:
    """One process and its ranks.

    Args:
        process: What was launched.
        folder: Where ranks and agent tell us.
        inbox: Signals.
        has_agent: The process is torchrun under our agent, not the script itself.
        ours: The command is known to use trainckpt.
        named: `--run`, or None.
        dumping: Who dumps the processes when asked, or None.
    """

    def __init__(
        self,
        process: Process,
        folder: Path,
        inbox: Inbox,
        *,
        has_agent: bool,
        ours: bool,
        named: NamedRun | None = None,
        dumping: Dumping | None = None,
    ) -> None:
        self._process, self._folder, self._inbox = process, folder, inbox
        self._has_agent, self._ours, self._named = has_agent, ours, named
        self._dumping = dumping
        self._seen: dict[int, int | None] = {}  # pid -> when it started; None: not a rank of ours
        self._namespace, self._elsewhere = namespace_of("self"), dict[tuple[int, str], int]()
        self._children: dict[int, int] = {}  # pid -> the agent's child that it is, or is under
        self._host = socket.gethostname()
        self._signalled_at = math.inf
        self._signal, self._passed_on = "", False
        self._notified = set[tuple[str, int]]()
        self._handed_on: orders.Order | None = None
        self._within_s: float | None = None  # what supervisors within may take after a signal
        self._lost_since: float | None = None
        self._cause, self._why, self._ended_at = "", "", math.inf

    def run(self) -> Course:
        """Until the process has ended; main thread."""
        self._inbox.stop_s = None
        threading.Thread(target=self._wait, name="trainckpt-wait", daemon=True).start()
        while (number := self._inbox.next(self._pause_s())) != ENDED:
            ranks = self._ranks()
            if number is not None:
                self._signalled(number, ranks)
            self._hand_on()
            self._write_notices(ranks)
            if self._passed_on and any(rank.listens for rank in ranks):
                self._stop_clock()
            if not self._cause:
                self._keep_time(ranks)
            if self._named is not None and self._process.poll() is None:
                told = [rank.told for rank in ranks]
                ours = self._imported() or bool(nested.read(self._folder))
                self._named.look(self._process.pid, told, imported=ours)
            self._dump_if_asked(ranks)
        if self._process.returncode != 0 and self._cause != verdict.DUMPED:
            kill_all(self._process, str(self._folder), self._told_pids())
        return self._course()

    def told(self) -> list[Told]:
        """Last words of this host's ranks."""
        return list(read_told(self._folder).values())

    def _wait(self) -> None:
        self._process.wait()
        self._inbox.put(ENDED)

    def _pause_s(self) -> float:
        now = time.monotonic()
        ends = [self._deadline(self._ranks())] if self._signal else []
        return min([LOOK_S, *(max(end - now, 0.01) for end in ends if not self._cause)])

    # ---- what the ranks have said

    def _ranks(self) -> list[Rank]:
        ends = {end.pid: end.code for end in read_ends(self._folder)}
        found = []
        for number, told in sorted(self._words().items()):
            if told.host == self._host:
                at = self._told_at(number)
                alive = self._is_alive(told.pid, at)
                code = None if alive else self._code(told.pid, ends)
                found.append(Rank(told, at, alive, code))
        return found

    def _words(self) -> dict[int, Told]:
        """What the ranks have told, their processes by the numbers that are valid here."""
        words = read_told(self._folder)
        return {number: self._numbered(told) for number, told in words.items()}

    def _numbered(self, told: Told) -> Told:
        if told.host != self._host:
            return told
        return replace(told, pid=self._number(told.pid, told.namespace))

    def _number(self, number: int, namespace: str) -> int:
        """The number, as of here, of a process that has another one where it is."""
        if namespace in ("", self._namespace):
            return number
        known = self._elsewhere.get((number, namespace))
        pid = known or seen_from_here(number, namespace, self._process.pid)
        if pid is not None:
            self._elsewhere[number, namespace] = pid
        return NOBODY if pid is None else pid

    def _code(self, pid: int, ends: Mapping[int, int]) -> int | None:
        """What a rank that is gone ended with, as far as anybody will ever know."""
        child = self._children.get(pid, pid)
        if pid in ends or child in ends:
            return ends.get(pid, ends.get(child))
        # Ranks that the script itself started are the script's to look after.
        return None if self._has_agent and started(child) is None else 0

    def _told_at(self, rank: int) -> float:
        try:
            return (self._folder / f"rank{rank}.json").stat().st_mtime
        except OSError:
            return time.time()

    def _is_alive(self, pid: int, told_at: float) -> bool:
        now = started(pid)
        if pid not in self._seen:
            ours = now is not None and is_ours(pid, str(self._folder), told_at)
            self._seen[pid] = now if ours else None
            self._children[pid] = child_above(pid, self._process.pid)
        return now is not None and now == self._seen[pid]

    def _told_pids(self) -> list[int]:
        return [rank.told.pid for rank in self._ranks() if rank.alive]

    def _imported(self) -> bool:
        return imported(self._folder, besides=self._process.pid if self._has_agent else None)

    def _within(self) -> tuple[int, ...]:
        """Supervisors that the command has launched, and that are at work."""
        words = [word for word in nested.read(self._folder) if word.exit_code is None]
        pids = [(self._number(word.pid, word.namespace), word.at) for word in words]
        return tuple(pid for pid, at in pids if self._is_alive(pid, at))

    # ---- what is done about it

    def _signalled(self, number: int, ranks: list[Rank]) -> None:
        order = orders.about_signal(
            number, ranks, ours=self._ours or self._imported(), within=self._within(),
            interrupts=self._inbox.interrupts,
        )  # fmt: skip
        name = signal.Signals(number).name
        if orders.may_be_dumped_instead(order, ranks, number) and self._dumped_instead(
            name, number, ranks
        ):
            return
        if order.what == orders.NOTHING and self._inbox.stop_s is None:
            self._inbox.stop_s = self._inbox.came_s
        if order.what in (orders.DELIVER, orders.HAND_ON):
            self._handed_on = order if order.what == orders.HAND_ON else None
            self._start_clock(name)
            send(order.pids, order.number)
        elif order.what == orders.PASS_ON:
            if ranks:  # their grace holds also for what is done after the end, such as a copy
                self._start_clock(name, passed_on=True)
            send([self._process.pid] if self._process.poll() is None else [], number)
        elif order.what == orders.END:
            self._end(verdict.START_UP, f"{name} came before any rank listened")
        elif order.what == orders.KILL:
            self._end(verdict.SECOND_INTERRUPT, name)

    def _start_clock(self, name: str, *, passed_on: bool = False) -> None:
        if not self._signal:
            self._signal, self._signalled_at = name, self._inbox.came_s or time.monotonic()
            self._passed_on = passed_on
            if self._inbox.stop_s is None:
                self._inbox.stop_s = self._inbox.came_s

    def _stop_clock(self) -> None:
        """The script has a Checkpointer again: it goes on, whatever it made of the signal."""
        self._signal, self._signalled_at, self._passed_on = "", math.inf, False
        self._inbox.stop_s = None

    def _hand_on(self) -> None:
        """Also to whoever the command launches after that: it was to stop, all of it."""
        order = self._handed_on
        if order is not None:
            new = tuple(pid for pid in self._within() if pid not in order.pids)
            self._handed_on = replace(order, pids=(*order.pids, *new))
            send(new, order.number)

    def _write_notices(self, ranks: list[Rank]) -> None:
        """To those that a signal would only kill, once they look for notices."""
        deaf = [r.told for r in ranks if r.listens and r.told.deaf and r.told.attempt is not None]
        new = {(told.run, told.attempt or 0) for told in deaf} - self._notified
        if not self._signal or self._passed_on or self._cause or not new:
            return
        self._notified |= new
        left_s = self._deadline(ranks) - time.monotonic()
        for run, attempt in new:
            write_notice(run, attempt, self._signal, None if math.isinf(left_s) else left_s)

    def _keep_time(self, ranks: list[Rank]) -> None:
        now = time.monotonic()
        if now >= self._deadline(ranks):
            after = now - self._signalled_at
            left = ", ".join(str(rank.told.rank) for rank in ranks if rank.alive)
            self._end(verdict.DEADLINE, f"deadline: {after:.1f} s after {self._signal} the run had "
                      f"not left (ranks still there: {left or 'none'})")  # fmt: skip
            return
        if not orders.someone_is_lost(ranks):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= (limit_s := orders.others_s(ranks)):
            gone = [rank for rank in ranks if rank.is_gone] or ranks
            self._end(verdict.OTHERS_LOST, f"rank {gone[0].told.rank} is gone, and the others did "
                      f"not end within {limit_s:.0f} s")  # fmt: skip

    def _dumped_instead(self, name: str, number: int, ranks: list[Rank]) -> bool:
        """Whether the processes were dumped because of a signal that they were to hear."""
        dumping = self._dumping
        if dumping is None or self._signal or self._cause or self._process.poll() is not None:
            return False
        grace_s = orders.deadline_after_s(ranks) if ranks else grace.without_ranks_s(self._facts())
        if not ranks and self._handles(number):
            return False
        came = self._inbox.came_s  # not the first: that one was answered, and is over
        gone_s = 0.0 if came is None else time.monotonic() - came
        left_s = None if grace_s is None else max(grace_s - gone_s, 0.0)
        wish = Wish(name, left_s, host_returns=grace.host_returns())
        done = self._is_dumped(dumping, dumping.notice(wish, [rank.told for rank in ranks]))
        self._inbox.stop_s = came if done else self._inbox.stop_s
        return done

    def _facts(self) -> Mapping[str, Any]:
        """Of the attempt, where it is this supervisor that has recorded it."""
        named = self._named
        return {} if named is None or named.record is None else named.record.facts

    def _handles(self, number: int) -> bool:
        """Whether the command does something of its own about a signal."""
        pid = self._process.pid
        return any(handles(each, number) for each in (children(pid) if self._has_agent else [pid]))

    def _dump_if_asked(self, ranks: list[Rank]) -> None:
        if self._dumping is None or self._cause or self._process.poll() is not None:
            return
        left_s = self._deadline(ranks) - time.monotonic()
        told = [rank.told for rank in ranks]
        self._is_dumped(self._dumping, self._dumping.look(told, left_s))

    def _is_dumped(self, dumping: Dumping, done: bool) -> bool:
        if done:
            self._cause, self._why = verdict.DUMPED, f"dumped as {dumping.taken}"
            self._ended_at = time.time()
        return done

    def _deadline(self, ranks: list[Rank]) -> float:
        told_s = [orders.deadline_after_s(ranks)]
        if self._handed_on is not None:  # kept once known: their ranks' words go when they do
            graces_s = nested.graces_s(nested.read(self._folder))
            self._within_s = orders.deadline_within_s(graces_s) or self._within_s
            told_s.append(self._within_s)
        return self._signalled_at + min((s for s in told_s if s is not None), default=math.inf)

    def _end(self, cause: str, why: str) -> None:
        if self._cause != verdict.SECOND_INTERRUPT:
            self._cause, self._why = cause, why
        self._ended_at = min(self._ended_at, time.time())
        kill_all(self._process, str(self._folder), self._told_pids())

    def _course(self) -> Course:
        code = self._process.returncode
        ends = read_ends(self._folder)
        if not self._has_agent:
            ends = [*ends, End(self._process.pid, code, time.time())]
        words = self._words()
        return Course(
            code=128 - code if code < 0 else code,
            told=[(told, self._told_at(number)) for number, told in words.items()],
            ends=ends,
            ours=self._ours or self._imported(),
            signalled=bool(self._signal),
            cause=self._cause,
            ended_at=self._ended_at,
            why=self._why,
            passed_on=self._signal if self._passed_on else "",
            dump=str(self._dumping.taken or "") if self._dumping is not None else "",
            within=nested.read(self._folder),
            script=None if self._has_agent else self._process.pid,
        )
