"""One launch, from its start to its end: signals are delivered, lost ranks noticed, time kept.

The main thread sleeps until something comes: a signal, or the end of the launched process, which
a thread of its own waits for. Twice a second it reads the ranks' status files. `signals`
decides, the monitor acts.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.rank_status import has_imported, namespace_of, read_rank_statuses
from trainckpt.launcher import nested, outcome, signals
from trainckpt.launcher.dumps import DumpReason, write_notice
from trainckpt.launcher.outcome import LaunchHistory
from trainckpt.launcher.processes import (
    child_above,
    children,
    handles,
    is_ours,
    kill_all,
    living,
    seen_from_here,
    send,
)
from trainckpt.launcher.signals import ENDED, RankProcess
from trainckpt.launcher.torchrun_agent import RankExit, read_ends

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import psutil

    from trainckpt.attempt.rank_status import RankStatus
    from trainckpt.launcher.dumps import Dumping
    from trainckpt.launcher.processes import Process
    from trainckpt.launcher.record import NamedRun
    from trainckpt.launcher.signals import Inbox

LOOK_S = 0.5
NOBODY = 2**30  # no kernel gives a process this number


class LaunchMonitor:
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
        self._seen: dict[int, psutil.Process | None] = {}  # by pid; None: not a rank of ours
        self._namespace, self._elsewhere = namespace_of("self"), dict[tuple[int, str], int]()
        self._children: dict[int, int] = {}  # pid -> the agent's child that it is, or is under
        self._host = socket.gethostname()
        self._signalled_at = math.inf
        self._signal, self._passed_on = "", False
        self._notified = set[tuple[str, int]]()
        self._handed_on: signals.SignalAction | None = None
        self._within_s: float | None = None  # what supervisors within may take after a signal
        self._lost_since: float | None = None
        self._cause, self._why, self._ended_at = "", "", math.inf

    def run(self) -> LaunchHistory:
        """Watch the launch until its process has ended, and return its history. Main thread."""
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
                statuses = [rank.told for rank in ranks]
                is_instrumented = self._imported() or bool(nested.read(self._folder))
                self._named.look(self._process.pid, statuses, imported=is_instrumented)
            self._dump_if_asked(ranks)
        if self._process.returncode != 0 and self._cause != outcome.DUMPED:
            kill_all(self._process, str(self._folder), self._told_pids())
        return self._course()

    def told(self) -> list[RankStatus]:
        """Last words of this host's ranks."""
        return list(read_rank_statuses(self._folder).values())

    def _wait(self) -> None:
        self._process.wait()
        self._inbox.put(ENDED)

    def _pause_s(self) -> float:
        now_s = time.monotonic()
        ends = [self._deadline(self._ranks())] if self._signal else []
        return min([LOOK_S, *(max(end - now_s, 0.01) for end in ends if not self._cause)])

    # ---- what the ranks have said

    def _ranks(self) -> list[RankProcess]:
        ends = {end.pid: end.code for end in read_ends(self._folder)}
        rank_processes = []
        for number, status in sorted(self._words().items()):
            if status.host == self._host:
                told_at = self._told_at(number)
                alive = self._is_alive(status.pid, told_at)
                code = None if alive else self._code(status.pid, ends)
                rank_processes.append(RankProcess(status, told_at, alive, code))
        return rank_processes

    def _words(self) -> dict[int, RankStatus]:
        """Return the ranks' statuses, with process ids that are valid in this namespace."""
        statuses = read_rank_statuses(self._folder)
        return {number: self._numbered(status) for number, status in statuses.items()}

    def _numbered(self, told: RankStatus) -> RankStatus:
        if told.host != self._host:
            return told
        return replace(told, pid=self._number(told.pid, told.namespace))

    def _number(self, number: int, namespace: str) -> int:
        """Return this host's number of a process in another pid namespace."""
        if namespace in ("", self._namespace):
            return number
        known_pid = self._elsewhere.get((number, namespace))
        pid = known_pid or seen_from_here(number, namespace, self._process.pid)
        if pid is not None:
            self._elsewhere[number, namespace] = pid
        return NOBODY if pid is None else pid

    def _code(self, pid: int, ends: Mapping[int, int]) -> int | None:
        """Return the exit code of a rank that is gone, or None if it is unknown."""
        child = self._children.get(pid, pid)
        if pid in ends or child in ends:
            return ends.get(pid, ends.get(child))
        # Ranks that the script itself started are the script's to look after.
        return None if self._has_agent and living(child) is None else 0

    def _told_at(self, rank: int) -> float:
        try:
            return (self._folder / f"rank{rank}.json").stat().st_mtime
        except OSError:
            return time.time()

    def _is_alive(self, pid: int, told_at: float) -> bool:
        process = living(pid)
        if pid not in self._seen:
            belongs = process is not None and is_ours(process, str(self._folder), told_at)
            self._seen[pid] = process if belongs else None
            self._children[pid] = child_above(pid, self._process.pid)
        return process is not None and process == self._seen[pid]

    def _told_pids(self) -> list[int]:
        return [rank.told.pid for rank in self._ranks() if rank.alive]

    def _imported(self) -> bool:
        return has_imported(self._folder, besides=self._process.pid if self._has_agent else None)

    def _within(self) -> tuple[int, ...]:
        """Supervisors that the command has launched, and that are at work."""
        reports = [report for report in nested.read(self._folder) if report.exit_code is None]
        pids = [(self._number(report.pid, report.namespace), report.at) for report in reports]
        return tuple(pid for pid, written_at in pids if self._is_alive(pid, written_at))

    # ---- what is done about it

    def _signalled(self, number: int, ranks: list[RankProcess]) -> None:
        order = signals.about_signal(
            number,
            ranks,
            ours=self._ours or self._imported(),
            within=self._within(),
            interrupts=self._inbox.interrupts,
        )
        name = signal.Signals(number).name
        if signals.may_be_dumped_instead(order, ranks, number) and self._dumped_instead(
            name, number, ranks
        ):
            return
        if order.what == signals.NOTHING and self._inbox.stop_s is None:
            self._inbox.stop_s = self._inbox.came_s
        if order.what in (signals.DELIVER, signals.HAND_ON):
            self._handed_on = order if order.what == signals.HAND_ON else None
            self._start_clock(name)
            send(order.pids, order.number)
        elif order.what == signals.PASS_ON:
            if ranks:  # their grace holds also for what is done after the end, such as a copy
                self._start_clock(name, passed_on=True)
            send([self._process.pid] if self._process.poll() is None else [], number)
        elif order.what == signals.END:
            self._end(outcome.START_UP, f"{name} came before any rank listened")
        elif order.what == signals.KILL:
            self._end(outcome.SECOND_INTERRUPT, name)

    def _start_clock(self, name: str, *, passed_on: bool = False) -> None:
        if not self._signal:
            self._signal, self._signalled_at = name, self._inbox.came_s or time.monotonic()
            self._passed_on = passed_on
            if self._inbox.stop_s is None:
                self._inbox.stop_s = self._inbox.came_s

    def _stop_clock(self) -> None:
        """Stop the clock: the script has a Checkpointer again, and goes on."""
        self._signal, self._signalled_at, self._passed_on = "", math.inf, False
        self._inbox.stop_s = None

    def _hand_on(self) -> None:
        """Also to whoever the command launches after that: it was to stop, all of it."""
        order = self._handed_on
        if order is not None:
            new = tuple(pid for pid in self._within() if pid not in order.pids)
            self._handed_on = replace(order, pids=(*order.pids, *new))
            send(new, order.number)

    def _write_notices(self, ranks: list[RankProcess]) -> None:
        """Write notices to ranks without signal handlers, once they look for notices."""
        deaf = [r.told for r in ranks if r.listens and r.told.deaf and r.told.attempt is not None]
        new = {(status.run, status.attempt or 0) for status in deaf} - self._notified
        if not self._signal or self._passed_on or self._cause or not new:
            return
        self._notified |= new
        left_s = self._deadline(ranks) - time.monotonic()
        for run, attempt in new:
            write_notice(run, attempt, self._signal, None if math.isinf(left_s) else left_s)

    def _keep_time(self, ranks: list[RankProcess]) -> None:
        now = time.monotonic()
        if now >= self._deadline(ranks):
            elapsed_s = now - self._signalled_at
            remaining_ranks = ", ".join(str(rank.told.rank) for rank in ranks if rank.alive)
            self._end(
                outcome.DEADLINE,
                f"deadline: {elapsed_s:.1f} s after {self._signal} the run had "
                f"not left (ranks still there: {remaining_ranks or 'none'})",
            )
            return
        if not signals.someone_is_lost(ranks):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= (limit_s := signals.others_s(ranks)):
            gone_ranks = [rank for rank in ranks if rank.is_gone] or ranks
            self._end(
                outcome.OTHERS_LOST,
                f"rank {gone_ranks[0].told.rank} died, and the other ranks did "
                f"not end within {limit_s:.0f} s",
            )

    def _dumped_instead(self, name: str, number: int, ranks: list[RankProcess]) -> bool:
        """Return True if the processes were dumped in place of receiving the signal."""
        dumping = self._dumping
        if dumping is None or self._signal or self._cause or self._process.poll() is not None:
            return False
        grace_s = (
            signals.deadline_after_s(ranks) if ranks else signals.without_ranks_s(self._facts())
        )
        if not ranks and self._handles(number):
            return False
        signalled_s = self._inbox.came_s  # not the first: that one was answered, and is over
        elapsed_s = 0.0 if signalled_s is None else time.monotonic() - signalled_s
        left_s = None if grace_s is None else max(grace_s - elapsed_s, 0.0)
        dump_reason = DumpReason(name, left_s, host_returns=signals.host_returns())
        is_dumped = self._is_dumped(
            dumping, dumping.notice(dump_reason, [rank.told for rank in ranks])
        )
        self._inbox.stop_s = signalled_s if is_dumped else self._inbox.stop_s
        return is_dumped

    def _facts(self) -> Mapping[str, Any]:
        """Return the facts of the attempt recorded by this supervisor; empty if the ranks recorded
        it.
        """
        run = self._named
        return {} if run is None or run.record is None else run.record.facts

    def _handles(self, number: int) -> bool:
        """Return True if the command handles or ignores a signal itself."""
        pid = self._process.pid
        return any(
            handles(child_pid, number)
            for child_pid in (children(pid) if self._has_agent else [pid])
        )

    def _dump_if_asked(self, ranks: list[RankProcess]) -> None:
        if self._dumping is None or self._cause or self._process.poll() is not None:
            return
        left_s = self._deadline(ranks) - time.monotonic()
        statuses = [rank.told for rank in ranks]
        self._is_dumped(self._dumping, self._dumping.look(statuses, left_s))

    def _is_dumped(self, dumping: Dumping, done: bool) -> bool:
        if done:
            self._cause, self._why = outcome.DUMPED, f"dumped as {dumping.taken}"
            self._ended_at = time.time()
        return done

    def _deadline(self, ranks: list[RankProcess]) -> float:
        limits_s = [signals.deadline_after_s(ranks)]
        if self._handed_on is not None:  # kept once known: their ranks' words go when they do
            graces_s = nested.graces_s(nested.read(self._folder))
            self._within_s = signals.deadline_within_s(graces_s) or self._within_s
            limits_s.append(self._within_s)
        return self._signalled_at + min((s for s in limits_s if s is not None), default=math.inf)

    def _end(self, cause: str, why: str) -> None:
        if self._cause != outcome.SECOND_INTERRUPT:
            self._cause, self._why = cause, why
        self._ended_at = min(self._ended_at, time.time())
        kill_all(self._process, str(self._folder), self._told_pids())

    def _course(self) -> LaunchHistory:
        code = self._process.returncode
        ends = read_ends(self._folder)
        if not self._has_agent:
            ends = [*ends, RankExit(self._process.pid, code, time.time())]
        statuses = self._words()
        return LaunchHistory(
            code=128 - code if code < 0 else code,
            told=[(status, self._told_at(number)) for number, status in statuses.items()],
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
