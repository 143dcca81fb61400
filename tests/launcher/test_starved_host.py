"""A supervisor on a host without a thread or process left: 69, for a scheduler to try again."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading

import pytest

from trainckpt.cli.main import main
from trainckpt.storage import compile_folder

WAITS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


@pytest.fixture
def without_threads(monkeypatch):
    """Refuse to start the threads of this name, as CPython does where the system refuses."""

    def without(name):
        start = threading.Thread.start

        def starts(thread):
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starts)

    return without


def is_starved(capfd):
    said = capfd.readouterr().err
    return "ulimit -a" in said and "bug" not in said


def test_a_launch_that_cannot_be_watched_is_ended(without_threads, tmp_path, capfd, monkeypatch):
    started, popen = [], subprocess.Popen

    def noted(*given, **more):
        started.append(popen(*given, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    without_threads("trainckpt-wait")
    command = [sys.executable, "-c", WAITS, str(tmp_path / "pid")]
    assert main(["run", "--json", "--dumps", "off", "--nproc", "1", "--", *command]) == 69
    told = json.loads(capfd.readouterr().out)
    assert told["code"] == 69
    assert "ulimit -a" in told["hint"]
    assert started[-1].wait(60) != 0


def test_a_command_that_cannot_be_started_is_no_wrong_command(tmp_path, capfd, monkeypatch):
    popen = subprocess.Popen

    def refuses(words, *given, **more):
        if words[0] == sys.executable and str(tmp_path) in words:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen(words, *given, **more)

    monkeypatch.setattr(subprocess, "Popen", refuses)
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    assert main(["run", "--dumps", "off", "--nproc", "1", "--", *command]) == 69
    assert is_starved(capfd)


def test_the_folder_of_compiled_code_is_used_without_its_thread(
    without_threads, tmp_path, monkeypatch
):
    monkeypatch.setattr(compile_folder, "folder_in_use", lambda _: tmp_path)
    without_threads("trainckpt-compile-folder")
    os.utime(tmp_path, (0, 0))
    with compile_folder.in_use({}):
        assert tmp_path.stat().st_mtime > 0
