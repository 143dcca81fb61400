"""The git commit of the script's directory, asked for in a thread.

Git compares every file of the repository with its commit, to say if there are local changes. That
takes seconds on a slow file system, and the start does not wait for it. It is killed if it has not
answered by the end of the Checkpointer or of the process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path

TIMEOUT_S = 60.0  # a repository on a slow network file system
LONGEST_REASON = 200  # characters
_COMMAND = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


class GitCommit:
    """The commit, with "-dirty" after local changes. Ask from any thread.

    None without a script, a repository or git.

    Attributes:
        why_unknown: The reason for None.
    """

    def __init__(self) -> None:
        self.why_unknown = "git did not answer"
        self._value: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._starting = threading.Lock()  # an end waits for a git that is being started
        self._thread = threading.Thread(target=self._ask, name="trainckpt-git", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """End git, if it has not answered. Repeated calls do nothing."""
        atexit.unregister(self.close)
        with self._starting:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def is_known_within(self, limit_s: float) -> bool:
        """Wait for git, and return True once `value` is final."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    @property
    def value(self) -> str | None:
        """Return the commit; None until it is known, too."""
        return self._value

    def _ask(self) -> None:
        # background thread: no collectives here
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        if script is None:
            self.why_unknown = "the script is in no file"
            return
        try:
            with self._starting:
                if self._is_closed:
                    return
                self._process = process = self._start_in(Path(script).resolve().parent)
        except OSError as error:
            self.why_unknown = f"git cannot be run: {error.strerror}"
            return
        with process:
            try:
                self._note(*process.communicate(timeout=TIMEOUT_S), process.returncode)
            except subprocess.TimeoutExpired:
                process.kill()
        atexit.unregister(self.close)

    @staticmethod
    def _start_in(folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            _COMMAND,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _note(self, output: bytes, errors: bytes, code: int) -> None:
        text = output.decode(errors="replace").strip()
        if code == 0 and text:
            self._value = text
        elif code >= 0:
            said = errors.decode(errors="replace").strip().splitlines()
            self.why_unknown = said[0][:LONGEST_REASON] if said else "git names none"
