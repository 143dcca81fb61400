"""Self test: dump two small processes here and restore them, in about a second.

They have a thread, a loopback connection, a socket pair and unlinked shared memory, as ranks do.
`criu check` cannot show that processes run on after a restore; this test does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trainckpt.process_dump import criu, no_io_uring, process_tree

PROGRAM = """
import mmap, os, socket, sys, tempfile, threading, time

memory = tempfile.TemporaryFile(dir=sys.argv[1])
memory.truncate(1 << 21)
shared = mmap.mmap(memory.fileno(), 1 << 21)
ours, theirs = socket.socketpair()
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    there = socket.create_connection(server.getsockname())
    while there.recv(1):
        shared[0] = (shared[0] + 1) % 250
        theirs.send(b"x")
    os._exit(0)
here, _ = server.accept()
threading.Thread(target=threading.Event().wait, daemon=True).start()
for number in range(10**9):
    here.send(b"x")
    ours.recv(1)
    assert shared[0] == (number + 1) % 250
    os.write(1, b"%d\\n" % number)
    time.sleep(0.01)
"""
LINES, WITHIN_S = 3, 30.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - unlinked there at once


@dataclass(frozen=True)
class SelfTestResult:
    """Seconds of the dump and of the restore, or the reason for a failure."""

    dump_s: float = 0.0
    restore_s: float = 0.0
    why_not: str = ""


def run(program: Path) -> SelfTestResult:
    """Dump and restore with this CRIU. Leaves no process and no file."""
    with tempfile.TemporaryDirectory(prefix="trainckpt-toy-") as place:
        folder = Path(place)
        log, images = folder / "log", folder / "images"
        images.mkdir(mode=0o700)
        with log.open("ab") as output, (folder / "errors").open("ab") as errors:
            python = [sys.executable, "-I", "-S"]
            shared = SHARED_MEMORY if Path(SHARED_MEMORY).is_dir() else place
            process = subprocess.Popen(
                [*python, no_io_uring.__file__, *python, "-c", PROGRAM, shared],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        try:
            return _try(program, process, log, images)
        finally:
            if process.poll() is None:
                process_tree.send(process_tree.processes(process.pid), signal.SIGKILL)
                process.wait()


def _try(
    program: Path, process: subprocess.Popen[bytes], log: Path, images: Path
) -> SelfTestResult:
    if not _counts_on(log, 0):
        return SelfTestResult(why_not="two small processes could not be started")
    start = time.monotonic()
    pids = process_tree.processes(process.pid)
    if error_text := criu.dump(program, process.pid, images):
        return SelfTestResult(why_not=f"a dump of two small processes failed: {error_text}")
    dumped = time.monotonic()
    process_tree.send(pids, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + WITHIN_S
    while process_tree.taken(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    count_before, restoring = len(log.read_bytes().split()), time.monotonic()
    if error_text := criu.restore(program, images, lambda: None):
        return SelfTestResult(why_not=f"a restore of two small processes failed: {error_text}")
    restored = time.monotonic()
    is_counting = _counts_on(log, count_before)
    process_tree.send(process_tree.processes(process.pid), signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)
    if not is_counting:
        return SelfTestResult(why_not="two small processes were restored, and did not go on")
    return SelfTestResult(dumped - start, restored - restoring)


def _counts_on(log: Path, before: int) -> bool:
    """Return True if the log gains more numbers within `WITHIN_S`, all consecutive."""
    deadline = time.monotonic() + WITHIN_S
    while len(numbers := log.read_bytes().split()) < before + LINES:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return all(int(number) == index for index, number in enumerate(numbers[:-1]))
