"""A launcher and ranks without torch, for tests of what the supervisor does about them.

`python ranks.py FOLDER TEXT TEXT ...` starts one rank for each text, in a session of its own, as
torchrun does, notes their ends as our agent does, and then waits for all of them, however long: it
ends nobody. A rank's text is Python; it has the functions below, and `rank`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess  # noqa: F401 - for the ranks' texts
import sys
import threading
import time
from pathlib import Path

from trainckpt.attempt.status_files import namespace_of
from trainckpt.launcher.torchrun_agent import ExitRecorder

FOLDER = Path(sys.argv[1])
TOLD = Path(os.environ["TRAINCKPT_SUPERVISOR"])


def tell(rank: int, **words: object) -> None:
    """Say something to the supervisor, as a Checkpointer would."""
    body = {
        "rank": rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "run": str(FOLDER / "run"),
        "attempt": None,
        "state": "listening",
        "grace_s": None,
        "how": None,
        "exit_code": None,
        "namespace": namespace_of("self"),
    }
    temporary = TOLD / f"{rank}.tmp"
    temporary.write_text(json.dumps(body | words))
    temporary.replace(TOLD / f"rank{rank}.json")


def ready(name: str) -> None:
    """Let the test, or another rank, know."""
    (FOLDER / name).touch()


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def heard(name: str, number: int = signal.SIGTERM) -> None:
    """Wait for a signal, and let the test know of it."""
    signal.sigwait({number})
    ready(name)


def block(*numbers: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers or {signal.SIGTERM, signal.SIGINT})


def launch(texts: list[str]) -> int:
    ends = ExitRecorder(TOLD)
    popen = ends.popen()
    threading.Thread(target=ends.watch, daemon=True).start()
    ranks = [
        popen(
            [sys.executable, __file__, str(FOLDER), f"rank:{number}", text],
            start_new_session=True,
        )
        for number, text in enumerate(texts)
    ]
    codes = [rank.wait() for rank in ranks]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    if sys.argv[2].startswith("rank:"):
        rank = int(sys.argv[2][5:])
        exec(sys.argv[3])
    else:
        sys.exit(launch(sys.argv[2:]))
