"""The git commit of the script's directory, asked for in a thread.

Git compares every file of the repository with its commit, to say if there are local changes. That
takes seconds on a slow file system, and the start does not wait for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

TIMEOUT_S = 60.0  # a repository on a slow network file system
_COMMAND = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


class GitCommit:
    """The commit, with "-dirty" after local changes. Ask from any thread.

    None without a script, a repository or git.
    """

    def __init__(self) -> None:
        self._value: str | None = None
        self._thread = threading.Thread(target=self._ask, name="trainckpt-git", daemon=True)
        self._thread.start()

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
            return
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(
                _COMMAND,
                cwd=Path(script).resolve().parent,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=True,
            )
            self._value = answer.stdout.decode(errors="replace").strip() or None
