"""Python programs as processes that have torch and trainckpt loaded, where start-up is no subject.

They are forked from the warm server (`tests.campaign.server`): importing takes two seconds of
processor time, and it pays them once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TICK_S = 0.01


class Process:
    """`python WORD ...`, in a session of its own, writing to these descriptors of ours.

    Attributes:
        pid: Its number.
        returncode: As `subprocess` has it, once that was asked for.
    """

    def __init__(self, server, words, out, err, *, env=None, cwd=ROOT, enter=None):
        self._server, self.returncode = server, None
        (self.pid,) = server.ask(
            python=[str(word) for word in words],
            cwd=str(cwd),
            enter=enter,
            environment=dict(os.environ) if env is None else env,
            out=f"/proc/{os.getpid()}/fd/{out}",
            err=f"/proc/{os.getpid()}/fd/{err}",
        )["pids"]

    def poll(self):
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            (self.returncode,) = self._server.ask(poll=[self.pid])["codes"]
        return self.returncode

    def wait(self, timeout):
        """Its exit code."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(TICK_S)
        return self.returncode

    def send_signal(self, number):
        """To this process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """It does not outlive the block."""
        self.kill()


class Told(Process):
    """A process whose output is read when it has ended."""

    def __init__(self, server, words, *, together=False, **how):
        # Closed by `communicate`.
        self._out = tempfile.TemporaryFile("r")  # noqa: SIM115
        self._err = self._out if together else tempfile.TemporaryFile("r")  # noqa: SIM115
        super().__init__(server, words, self._out.fileno(), self._err.fileno(), **how)

    def communicate(self, timeout):
        """What it wrote; at the end of its time it is killed."""
        try:
            self.wait(timeout)
        finally:
            self.kill()
        texts = []
        for file in (self._out, self._err):
            if file.closed:  # it went where the other did
                texts.append(None)
                continue
            with contextlib.closing(file):
                texts.append(file.read())
        return tuple(texts)

    def __exit__(self, *_):
        super().__exit__()
        self._out.close()
        self._err.close()


def run(server, words, *, timeout=100, **how):
    """As `subprocess.run`, of `python WORD ...`."""
    process = Told(server, words, **how)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(words, process.returncode, out, err)
