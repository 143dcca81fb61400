"""Git names the commit of the script, and does not outlive those that ask."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys

import pytest

from tests.limits import HANG_S
from trainckpt.attempt.git_commit import GitCommit

ASKS = """
import sys
from trainckpt.attempt.git_commit import GitCommit
commit = GitCommit()
sys.stdin.readline()
"""


class HangingGit:
    """A git that does not answer; its pipe is open for as long as it runs."""

    def __init__(self, folder, monkeypatch):
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)
        git = folder / "git"
        git.write_text(f"#!/bin/sh\nexec 3>{self.pipe}\necho begun >&3\nexec sleep 86400")
        git.chmod(0o700)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self._reader = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)

    def reads(self):
        """Wait for a line of git, or for its end: ""."""
        assert select.select([self._reader], [], [], HANG_S)[0]
        return os.read(self._reader, 100).decode()

    def close(self):
        os.close(self._reader)


@pytest.fixture
def git(tmp_path, monkeypatch):
    """A git that has not answered yet."""
    hanging = HangingGit(tmp_path, monkeypatch)
    yield hanging
    hanging.close()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The file of the script."""
    path = tmp_path / "train.py"
    path.write_text(ASKS)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
    return path


def test_close_ends_a_git_that_has_not_answered(git, script):
    commit = GitCommit()
    assert git.reads() == "begun\n"
    assert not commit.is_known_within(0)
    commit.close()
    commit.close()
    assert git.reads() == ""
    assert commit.is_known_within(HANG_S)
    assert commit.value is None
    assert commit.why_unknown == "git did not answer"


def test_the_end_of_the_process_ends_git(git, script):
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE)
    assert git.reads() == "begun\n"
    process.communicate(b"\n", timeout=HANG_S)
    assert process.returncode == 0
    assert git.reads() == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_folder_in_no_repository_is_why_no_commit_is_known(script, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(script.parent.parent))
    commit = GitCommit()
    assert commit.is_known_within(HANG_S)
    assert commit.value is None
    assert "not a git repository" in commit.why_unknown


def test_a_missing_git_is_why_no_commit_is_known(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    commit = GitCommit()
    assert commit.is_known_within(HANG_S)
    assert commit.why_unknown == "git cannot be run: No such file or directory"
