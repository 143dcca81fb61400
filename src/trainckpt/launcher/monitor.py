"""One launch, from its start to its end: signals are delivered, lost ranks noticed, time kept.

The main thread sleeps until a signal comes or the launched process ends; another thread waits for
that end. Twice a second it reads the ranks' status files. `supervisor_signals` decides, the monitor
acts.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.attempt.status_files import has_imported, namespace_of, read_rank_statuses
from trainckpt.launcher import nested, outcome, supervisor_signals
from trainckpt.launcher.dumper import DumpReason, write_notice
from trainckpt.launcher.outcome import LaunchHistory
from trainckpt.launcher.processes import (
    child_above,
    children,
    handles,
    is_ours,
    kill_all,
    living,
    seen_from_here,
)
from trainckpt.launcher.supervisor_signals import ENDED, RankProcess
from trainckpt.launcher.torchrun_agent import RankExit, read_ends
from trainckpt.process_dump.process_tree import send

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import psutil

    from trainckpt.attempt.status_files import RankStatus
    from trainckpt.launcher.dumper import Dumper
    from trainckpt.launcher.processes import Process
    from trainckpt.launcher.supervisor_record import NamedRun
    from trainckpt.launcher.supervisor_signals import Inbox

LOOK_S = 0.5
NO_PROCESS = 2**30  # no kernel gives a process this number


class LaunchMonitor:
    """One process and its ranks.

    Args:
        process: The launched process.
        folder: Folder of the status files of ranks and agent.
        inbox: Signals.
        has_agent: The process is torchrun under our agent, not the script itself.
        restarts_ranks: torchrun starts ranks again by itself, as agents on other hosts come and go.
        ours: The command is known to use trainckpt.
        named: `--run`, or None.
        dumper: Dumps the processes on request; None: no dumps.
    """

    def __init__(
        self,
        process: Process,
        folder: Path,
        inbox: Inbox,
        *,
        has_agent: bool,
        ours: bool,
        restarts_ranks: bool = False,
        named: NamedRun | None = None,
        dumper: Dumper | None = None,
    ) -> None:
        self._process, self._folder, self._inbox = process, folder, inbox
        self._has_agent, self._ours, self._named = has_agent, ours, named
        self._dumper = dumper
        self._restarts_ranks = restarts_ranks
        self._seen: dict[int, psutil.Process | None] = {}  # by pid; None: not a rank of ours
        self._namespace, self._elsewhere = namespace_of("self"), dict[tuple[int, str], int]()
        self._children: dict[int, int] = {}  # pid -> the agent's child that it is, or is under
        self._host = socket.gethostname()
        self._signalled_at = math.inf
        self._signal, self._went_to_script = "", False
        self._notified = set[tuple[str, int]]()
        self._sent_to_nested: supervisor_signals.SignalAction | None = None
        self._nested_grace_s: float | None = None
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
            self._signal_new_nested()
            self._write_notices(ranks)
            if self._went_to_script and any(rank.handles_signals for rank in ranks):
                # Stop the clock: the script has a Checkpointer again, and goes on.
                self._signal, self._signalled_at, self._went_to_script = "", math.inf, False
                self._inbox.stop_s = None
            if not self._cause:
                self._keep_time(ranks)
            if self._named is not None and self._process.poll() is None:
                statuses = [rank.status for rank in ranks]
                is_instrumented = self._imported() or bool(nested.read(self._folder))
                self._named.observe(self._process.pid, statuses, imported=is_instrumented)
            if (dumper := self._ready_dumper()) is not None:
                left_s = self._deadline(ranks) - time.monotonic()
                self._note_dump(dumper, dumper.look([rank.status for rank in ranks], left_s))
        if self._process.returncode != 0 and self._cause != outcome.DUMPED:
            self._kill_all()
        return self._history()

    def statuses(self) -> list[RankStatus]:
        """Return the last statuses of this host's ranks."""
        return list(read_rank_statuses(self._folder).values())

    def _wait(self) -> None:
        self._process.wait()
        self._inbox.put(ENDED)

    def _pause_s(self) -> float:
        if not self._signal or self._cause:
            return LOOK_S
        return min(LOOK_S, max(self._deadline(self._ranks()) - time.monotonic(), 0.01))

    # ---- statuses of the ranks

    def _ranks(self) -> list[RankProcess]:
        ends = {end.pid: end.code for end in read_ends(self._folder)}
        rank_processes = []
        for number, status in sorted(self._read_statuses().items()):
            if status.host == self._host:
                reported_at = self._reported_at(number)
                alive = self._is_alive(status.pid, reported_at)
                code = None if alive else self._code(status.pid, ends)
                rank_processes.append(RankProcess(status, reported_at, alive, code))
        return rank_processes

    def _read_statuses(self) -> dict[int, RankStatus]:
        """Return the ranks' statuses, with process ids that are valid in this namespace."""
        return {
            number: replace(status, pid=self._number(status.pid, status.namespace))
            if status.host == self._host
            else status
            for number, status in read_rank_statuses(self._folder).items()
        }

    def _number(self, number: int, namespace: str) -> int:
        """Return this host's number of a process in another pid namespace."""
        if namespace in ("", self._namespace):
            return number
        known_pid = self._elsewhere.get((number, namespace))
        pid = known_pid or seen_from_here(number, namespace, self._process.pid)
        if pid is not None:
            self._elsewhere[number, namespace] = pid
        return NO_PROCESS if pid is None else pid

    def _code(self, pid: int, ends: Mapping[int, int]) -> int | None:
        """Return the exit code of a rank that is gone, or None if it is unknown."""
        child = self._children.get(pid, pid)
        if pid in ends or child in ends:
            return ends.get(pid, ends.get(child))
        # Ranks that the script itself started are the script's to look after.
        return None if self._has_agent and living(child) is None else 0

    def _reported_at(self, rank: int) -> float:
        try:
            return (self._folder / f"rank{rank}.json").stat().st_mtime
        except OSError:
            return time.time()

    def _is_alive(self, pid: int, reported_at: float) -> bool:
        process = living(pid)
        if pid not in self._seen:
            belongs = process is not None and is_ours(process, str(self._folder), reported_at)
            self._seen[pid] = process if belongs else None
            self._children[pid] = child_above(pid, self._process.pid)
        return process is not None and process == self._seen[pid]

    def _imported(self) -> bool:
        return has_imported(self._folder, besides=self._process.pid if self._has_agent else None)

    def _nested(self) -> tuple[int, ...]:
        """Return the process ids of nested supervisors at work."""
        reports = [report for report in nested.read(self._folder) if report.exit_code is None]
        pids = [(self._number(report.pid, report.namespace), report.at) for report in reports]
        return tuple(pid for pid, written_at in pids if self._is_alive(pid, written_at))

    # ---- actions

    def _signalled(self, number: int, ranks: list[RankProcess]) -> None:
        action = supervisor_signals.about_signal(
            number,
            ranks,
            ours=self._ours or self._imported(),
            nested=self._nested(),
            interrupts=self._inbox.interrupts,
            agent=self._process.pid if self._restarts_ranks else None,
        )
        name = signal.Signals(number).name
        if supervisor_signals.may_be_dumped_instead(action, ranks, number) and self._dumped_instead(
            name, number, ranks
        ):
            return
        if action.what == supervisor_signals.NOTHING and self._inbox.stop_s is None:
            self._inbox.stop_s = self._inbox.came_s
        if action.what in (supervisor_signals.TO_RANKS, supervisor_signals.TO_NESTED):
            self._sent_to_nested = action if action.what == supervisor_signals.TO_NESTED else None
            self._start_clock(name)
            send(action.pids, action.number)
        elif action.what == supervisor_signals.TO_SCRIPT:
            if ranks:  # their grace holds also for what is done after the end, such as a copy
                self._start_clock(name, to_script=True)
            send([self._process.pid] if self._process.poll() is None else [], number)
        elif action.what == supervisor_signals.END:
            self._end(outcome.START_UP, f"{name} came before any rank listened")
        elif action.what == supervisor_signals.KILL:
            self._end(outcome.SECOND_INTERRUPT, name)

    def _start_clock(self, name: str, *, to_script: bool = False) -> None:
        if not self._signal:
            self._signal, self._signalled_at = name, self._inbox.came_s or time.monotonic()
            self._went_to_script = to_script
            if self._inbox.stop_s is None:
                self._inbox.stop_s = self._inbox.came_s

    def _signal_new_nested(self) -> None:
        """Signal nested supervisors started after the signal too: the whole command is to stop."""
        sent = self._sent_to_nested
        if sent is not None:
            new = tuple(pid for pid in self._nested() if pid not in sent.pids)
            self._sent_to_nested = replace(sent, pids=(*sent.pids, *new))
            send(new, sent.number)

    def _write_notices(self, ranks: list[RankProcess]) -> None:
        """Write notices to ranks without signal handlers, once they look for notices."""
        deaf = [
            r.status
            for r in ranks
            if r.handles_signals and r.status.deaf and r.status.attempt is not None
        ]
        new = {(status.run, status.attempt or 0) for status in deaf} - self._notified
        if not self._signal or self._went_to_script or self._cause or not new:
            return
        self._notified |= new
        left_s = self._deadline(ranks) - time.monotonic()
        for run, attempt in new:
            write_notice(run, attempt, self._signal, None if math.isinf(left_s) else left_s)

    def _keep_time(self, ranks: list[RankProcess]) -> None:
        now = time.monotonic()
        if now >= self._deadline(ranks):
            elapsed_s = now - self._signalled_at
            remaining_ranks = ", ".join(str(rank.status.rank) for rank in ranks if rank.alive)
            self._end(
                outcome.DEADLINE,
                f"deadline: {elapsed_s:.1f} s after {self._signal} the run had "
                f"not left (ranks still there: {remaining_ranks or 'none'})",
            )
            return
        if self._restarts_ranks or not supervisor_signals.someone_is_lost(ranks):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= (limit_s := supervisor_signals.others_s(ranks)):
            gone_ranks = [rank for rank in ranks if rank.is_gone] or ranks
            self._end(
                outcome.OTHERS_LOST,
                f"rank {gone_ranks[0].status.rank} died, and the other ranks did "
                f"not end within {limit_s:.0f} s",
            )

    def _dumped_instead(self, name: str, number: int, ranks: list[RankProcess]) -> bool:
        """Return True if the processes were dumped in place of receiving the signal."""
        dumper = self._ready_dumper()
        if dumper is None or self._signal:
            return False
        if ranks:
            grace_s = supervisor_signals.deadline_after_s(ranks)
        else:
            pid = self._process.pid
            if any(handles(p, number) for p in (children(pid) if self._has_agent else [pid])):
                return False  # the command handles or ignores the signal itself
            record = None if self._named is None else self._named.record
            grace_s = supervisor_signals.without_ranks_s({} if record is None else record.facts)
        signalled_s = self._inbox.came_s  # not the first: that one was answered, and is over
        elapsed_s = 0.0 if signalled_s is None else time.monotonic() - signalled_s
        left_s = None if grace_s is None else max(grace_s - elapsed_s, 0.0)
        reason = DumpReason(name, left_s, host_returns=supervisor_signals.host_returns())
        is_dumped = dumper.notice(reason, [rank.status for rank in ranks])
        self._note_dump(dumper, is_dumped)
        if is_dumped:
            self._inbox.stop_s = signalled_s
        return is_dumped

    def _ready_dumper(self) -> Dumper | None:
        """Return the dumper while the processes can be dumped."""
        return self._dumper if not self._cause and self._process.poll() is None else None

    def _note_dump(self, dumper: Dumper, is_dumped: bool) -> None:
        if is_dumped:
            self._cause, self._why = outcome.DUMPED, f"dumped as {dumper.taken}"
            self._ended_at = time.time()

    def _deadline(self, ranks: list[RankProcess]) -> float:
        limits_s = [supervisor_signals.deadline_after_s(ranks)]
        if self._sent_to_nested is not None:  # kept once known: the statuses go with their ranks
            graces_s = nested.graces_s(nested.read(self._folder))
            grace_s = supervisor_signals.nested_deadline_s(graces_s)
            self._nested_grace_s = grace_s or self._nested_grace_s
            limits_s.append(self._nested_grace_s)
        return self._signalled_at + min((s for s in limits_s if s is not None), default=math.inf)

    def _end(self, cause: str, why: str) -> None:
        if self._cause != outcome.SECOND_INTERRUPT:
            self._cause, self._why = cause, why
        self._ended_at = min(self._ended_at, time.time())
        self._kill_all()

    def _kill_all(self) -> None:
        reported_pids = [rank.status.pid for rank in self._ranks() if rank.alive]
        kill_all(self._process, str(self._folder), reported_pids)

    def _history(self) -> LaunchHistory:
        code = self._process.returncode
        ends = read_ends(self._folder)
        if not self._has_agent:
            ends = [*ends, RankExit(self._process.pid, code, time.time())]
        statuses = self._read_statuses()
        return LaunchHistory(
            code=128 - code if code < 0 else code,
            statuses=[(status, self._reported_at(number)) for number, status in statuses.items()],
            ends=ends,
            ours=self._ours or self._imported(),
            signalled=bool(self._signal),
            cause=self._cause,
            ended_at=self._ended_at,
            why=self._why,
            to_script=self._signal if self._went_to_script else "",
            dump=str(self._dumper.taken or "") if self._dumper is not None else "",
            within=nested.read(self._folder),
            script=None if self._has_agent else self._process.pid,
        )
