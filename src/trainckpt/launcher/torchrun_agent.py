"""torchrun as a process that records how each of its ranks ended.

`python -m trainckpt.launcher.torchrun_agent ARGS` is `python -m torch.distributed.run ARGS`, and

    while it runs   a thread records each rank's exit (see "Exit records"); torchrun's own wait for
                    a rank records it too, if it comes first
    at its end      the failed ranks that torchrun found are recorded too
    after a stop    torchrun takes the ranks' exit codes for failures; its report and traceback
                    are left out. For real failures they stay

Where the number of agents may change, torchrun starts its ranks again after a failure. So

    before that         what the ranks before have reported is removed
    after a notice      that this host or the whole run is to stop, torchrun is told to end, and
                        after a refusal. After a stop for another host's sake it starts its ranks
                        again

Exit code: 0 or 1 as torchrun's, 128 + n if it was ended by a signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainckpt.attempt.status_files import (
    REFUSED,
    SUPERVISOR_VARIABLE,
    parse_status,
    read_rank_statuses,
)
from trainckpt.format.attempt_record import STOPPED
from trainckpt.gc_pause import gc_paused
from trainckpt.launcher import nested
from trainckpt.launcher.processes import children
from trainckpt.launcher.torchrun_command import is_elastic, options_of
from trainckpt.storage.private_files import atomic_write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


# ---- Exit records, in the supervisor's folder
#
#     ends.jsonl     one line as each child of the agent ends, in that order: {pid, code, at}
#     failures.json  what torchrun itself found, at its end: [{rank, pid, code}, ...]
#
# A code is negative for a signal, as in `subprocess`. torchrun alone does not say who ended first:
# it looks ten times a second, and then ends the others.


ENDS, FAILURES = "ends.jsonl", "failures.json"


@dataclass(frozen=True)
class RankExit:
    """One process that ended."""

    pid: int
    code: int  # exit code; negative for a signal
    at: float = math.inf  # when (`time.time`); infinite where that was not seen
    rank: int | None = None  # which rank it was, where that is known


def write_end(folder: Path, end: RankExit) -> None:
    """Add one line; a folder that is gone stops nothing."""
    line = json.dumps({"pid": end.pid, "code": end.code, "at": end.at}) + "\n"
    with contextlib.suppress(OSError), (folder / ENDS).open("a", encoding="utf-8") as file:
        file.write(line)


def write_failures(folder: Path, failures: Iterable[Mapping[str, Any]]) -> None:
    """Write what torchrun found: rank, pid and code of each failed process."""
    with contextlib.suppress(OSError):
        atomic_write_json(folder / FAILURES, list(failures))


def read_ends(folder: Path) -> list[RankExit]:
    """Return every recorded end in order; those found by torchrun alone come last."""
    ends: dict[int, RankExit] = {}
    with contextlib.suppress(OSError):
        for line in (folder / ENDS).read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                if (end := parse_status(json.loads(line), RankExit)) is not None:
                    ends[end.pid] = end
    failures: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        failures = json.loads((folder / FAILURES).read_bytes())
    for body in failures if isinstance(failures, list) else []:
        if (failure := parse_status(body, RankExit)) is not None:
            ends[failure.pid] = replace(ends.get(failure.pid, failure), rank=failure.rank)
    return sorted(ends.values(), key=lambda end: end.at)


# ---- the agent


SIGNALS_VARIABLE = "PET_SIGNALS_TO_HANDLE"  # torchrun's own, for the option of that name
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # without the last one it would die of it
NOISY = ("multiprocessing.api", "multiprocessing.subprocess_handler", "agent.server.api")
NO_CHILDREN_PAUSE_S = 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2


def main() -> int:
    """Run torchrun with this process's arguments; returns the exit code."""
    folder = Path(os.environ.get(SUPERVISOR_VARIABLE) or os.devnull)
    os.environ.setdefault(SIGNALS_VARIABLE, SIGNALS)
    agents_change = is_elastic(options_of(sys.argv[1:]))
    ends = ExitRecorder(folder, on_end=end_if_final if agents_change else None)
    # Before torchrun takes it from there.
    subprocess.Popen = ends.popen()  # type: ignore[misc, assignment]
    if hasattr(os, "waitid"):
        threading.Thread(target=ends.watch, name="trainckpt-ends", daemon=True).start()

    def is_wanted(_: logging.LogRecord) -> bool:
        return not all_stopped(folder)

    for name in NOISY:
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(is_wanted)

    with gc_paused():
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        failures = [(rank, f.pid, f.exitcode) for rank, f in error.failures.items()]
        write_failures(folder, [{"rank": r, "pid": p, "code": c} for r, p, c in failures])
        if not all_stopped(folder):
            raise
        return 1
    except Exception as error:
        number = getattr(error, "sigval", None)  # torchrun's SignalException
        if number is None:
            raise
        ends.note_what_was_waited_for()
        return 128 + int(number)
    return 0


def all_stopped(folder: Path) -> bool:
    """Return True if every rank or inner supervisor with a status has stopped on purpose."""
    ranks = read_rank_statuses(folder).values()
    return all(status.how == STOPPED for status in ranks) if ranks else nested.all_stopped(folder)


def end_if_final(folder: Path) -> None:
    """End torchrun, as a scheduler would, if a rank of this host stopped after a notice, or was
    refused: the next ranks would be refused too."""
    ranks = read_rank_statuses(folder).values()
    if any((one.how == STOPPED and one.asked) or one.how == REFUSED for one in ranks):
        os.kill(os.getpid(), signal.SIGTERM)


class ExitRecorder:
    """Notes how the children of this process end, without waiting for them in torchrun's place.

    `on_end` is called after each note, with the folder. Any thread.
    """

    def __init__(self, folder: Path, on_end: Callable[[Path], object] | None = None) -> None:
        self._folder, self._on_end = folder, on_end
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._noted: set[int] = set()
        # A child that is noted has its line. Reentrant, since a signal handler may raise just after
        # this thread has taken the lock, which from Python 3.14 on then stays locked.
        self._lock = threading.RLock()

    def watch(self) -> None:
        """Sleep until a child ends, note all that have, and so on. A thread of its own."""
        while True:
            try:
                first_exit = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                time.sleep(NO_CHILDREN_PAUSE_S)
                continue
            self._note_result(first_exit)
            pause_s = FIRST_PAUSE_S
            while self._note_ended():  # until torchrun has waited for them too
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def popen(self) -> type[subprocess.Popen[bytes]]:
        """Return a Popen that records exits: the thread misses one that was waited for already."""
        ends = self

        class Popen(subprocess.Popen[bytes]):
            def __init__(self, *args: Any, **named: Any) -> None:
                if named.get("start_new_session"):
                    ends.begin_ranks()
                super().__init__(*args, **named)
                self._is_rank = bool(named.get("start_new_session"))
                if self._is_rank:
                    ends.ranks.append(self)

            def poll(self) -> int | None:
                code = super().poll()
                self._note(code)
                return code

            def wait(self, timeout: float | None = None) -> int:
                code = super().wait(timeout)
                self._note(code)
                return code

            def _note(self, code: int | None) -> None:
                if code is not None and self._is_rank:
                    ends.note(self.pid, code)

        return Popen

    def begin_ranks(self) -> None:
        """Forget the ranks before, once all of them have ended: others take their place."""
        with self._lock:
            if self.ranks and all(rank.returncode is not None for rank in self.ranks):
                self.ranks.clear()
                for pattern in ("rank*.json", "pace*.json", ENDS):
                    for path in self._folder.glob(pattern):
                        path.unlink(missing_ok=True)

    def note_what_was_waited_for(self) -> None:
        """Note ends seen by a wait that a signal interrupted before its note."""
        for rank in self.ranks:
            if rank.returncode is not None:
                self.note(rank.pid, rank.returncode)

    def note(self, pid: int, code: int) -> None:
        """Note that a rank has ended, once."""
        with self._lock:
            if pid not in self._noted:
                write_end(self._folder, RankExit(pid, code, time.time()))
                self._noted.add(pid)
                if self._on_end is not None:
                    self._on_end(self._folder)

    def _note_ended(self) -> bool:
        any_ended = False
        for pid in children(os.getpid()):
            try:
                exit_info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                continue
            if exit_info is not None:
                any_ended = True
                self._note_result(exit_info)
        return any_ended

    def _note_result(self, found: os.waitid_result | None) -> None:
        # torchrun's ranks lead sessions of their own; its other children are helpers. A process
        # that is gone was waited for, and recorded there.
        with contextlib.suppress(OSError):
            if found is not None and os.getsid(found.si_pid) == found.si_pid:
                exited = found.si_code == os.CLD_EXITED
                self.note(found.si_pid, found.si_status if exited else -found.si_status)


def leave(code: int) -> NoReturn:
    """End this process without taking torch down: the supervisor waits for it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
