"""torchrun, and nothing but torchrun, as a process that says how each of its ranks ended.

`python -m trainckpt.supervisor.agent ARGS` is `python -m torch.distributed.run ARGS`, and besides

    while it runs   a thread notes each child's end, in order, with its code (see `report`)
    at its end      the ranks and codes that torchrun found are written too
    after a stop    torchrun takes the ranks' exit codes for failures; its report and traceback
                    would be noise, so they are left out. For real failures they stay

Exit code: 0 or 1 as torchrun's, 128 + n where it was ended by a signal.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from trainckpt.format.attempt import STOPPED
from trainckpt.importing import without_collections
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE, read_told
from trainckpt.supervisor.processes import children
from trainckpt.supervisor.report import End, write_end, write_failures

SIGNALS_VARIABLE = "PET_SIGNALS_TO_HANDLE"  # torchrun's own, for the option of that name
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # without the last one it would die of it
NOISY = ("multiprocessing.api", "multiprocessing.subprocess_handler", "agent.server.api")
NO_CHILDREN_PAUSE_S = 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2


def main() -> int:
    """Run torchrun with this process's arguments; returns the exit code."""
    folder = Path(os.environ.get(SUPERVISOR_VARIABLE) or os.devnull)
    os.environ.setdefault(SIGNALS_VARIABLE, SIGNALS)
    ends = Ends(folder)
    if hasattr(os, "waitid"):
        threading.Thread(target=ends.watch, name="trainckpt-ends", daemon=True).start()

    def is_wanted(_: logging.LogRecord) -> bool:
        return not all_stopped(folder)

    for name in NOISY:
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(is_wanted)

    with without_collections():
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        found = [(rank, f.pid, f.exitcode) for rank, f in error.failures.items()]
        write_failures(folder, [{"rank": r, "pid": p, "code": c} for r, p, c in found])
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
    """Whether every rank that has said anything has stopped on purpose."""
    ranks = read_told(folder).values()
    return bool(ranks) and all(told.how == STOPPED for told in ranks)


class Ends:
    """Notes how the children of this process end, without waiting for them in torchrun's place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._noted: set[int] = set()
        self._lock = threading.Lock()  # who finds a child noted may rely on the line being there

    def watch(self) -> None:
        """Sleep until a child ends, note all that have, and so on. A thread of its own."""
        while True:
            try:
                first = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                time.sleep(NO_CHILDREN_PAUSE_S)
                continue
            self._note_result(first)
            pause_s = FIRST_PAUSE_S
            while self._note_ended():  # until torchrun has waited for them too
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def note_what_was_waited_for(self) -> None:
        """Children that torchrun was faster to wait for than the thread."""
        for process in gc.get_objects():
            # Not isinstance: that asks some of torch's objects for their class, and they warn.
            if issubclass(type(process), subprocess.Popen) and process.returncode is not None:
                self._note(process.pid, process.returncode)

    def _note_ended(self) -> bool:
        ended = False
        for pid in children(os.getpid()):
            try:
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                continue
            if found is not None:
                ended = True
                self._note_result(found)
        return ended

    def _note_result(self, found: os.waitid_result | None) -> None:
        if found is not None:
            exited = found.si_code == os.CLD_EXITED
            self._note(found.si_pid, found.si_status if exited else -found.si_status)

    def _note(self, pid: int, code: int) -> None:
        # torchrun's ranks lead sessions of their own; what else it starts are helpers.
        with self._lock:
            if pid not in self._noted and _led_a_session(pid):
                write_end(self._folder, End(pid, code, time.time()))
                self._noted.add(pid)


def _led_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return True  # waited for already


def leave(code: int) -> NoReturn:
    """End this process without taking torch down: the supervisor waits for it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
