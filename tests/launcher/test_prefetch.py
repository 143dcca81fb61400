"""What a run will most likely begin from is in memory before its ranks ask for it."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from tests.end_to_end.test_memory_tier import flip
from tests.end_to_end.training import attempt, crashed, usable
from tests.limits import HANG_S
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE
from trainckpt.launcher import prefetch
from trainckpt.launcher.torchrun_command import likely_run
from trainckpt.resume import host_cache
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history, fetch
from trainckpt.storage.direct_io import PAGE_BYTES
from trainckpt.storage.local import Disk, LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

CRASH_AT = 9


@pytest.fixture
def crashed_run(tmp_path):
    """A run whose memory is gone, as after a restart of its host."""
    crashed(tmp_path, CRASH_AT, epochs=3)
    SharedMemoryDir.found(str(tmp_path)).remove()
    yield tmp_path
    place = SharedMemoryDir.found(str(tmp_path))
    if place is not None:
        place.remove()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The end of the run that never stopped."""
    parts, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=3)
    return parts.state()


def test_the_newest_snapshot_is_brought_and_read_from_there(crashed_run, straight, caplog):
    assert prefetch.main([str(crashed_run)]) == 0
    newest = usable(crashed_run)[-1]
    assert SharedMemoryDir.found(str(crashed_run)).folders() == [f"snapshots/{newest}"]
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, _ = attempt(crashed_run, epochs=3)
    assert f"{newest} was read from memory" in caplog.text
    assert parts.state() == straight


def test_a_prefetch_beside_a_launch_brings_the_newest_snapshot(crashed_run):
    newest = usable(crashed_run)[-1]
    with prefetch.beside(str(crashed_run), {**os.environ, SUPERVISOR_VARIABLE: "none"}, None):
        until_s = time.monotonic() + HANG_S
        while (memory := SharedMemoryDir.found(str(crashed_run))) is None or not memory.folders():
            assert time.monotonic() < until_s
            time.sleep(0.02)
    assert memory.folders() == [f"snapshots/{newest}"]


def test_a_file_that_was_written_to_in_memory_is_refused(crashed_run, straight, caplog):
    prefetch.main([str(crashed_run)])
    newest = usable(crashed_run)[-1]
    held = SharedMemoryDir.found(str(crashed_run)).root / "snapshots" / newest
    flip(held / "rank00000.safetensors", -1)
    parts, _ = attempt(crashed_run, epochs=3)
    assert f"{newest} is damaged in memory" in caplog.text
    assert parts.state() == straight


def test_a_file_that_is_damaged_in_the_run_directory_is_refused_from_memory_too(crashed_run):
    newest = usable(crashed_run)[-1]
    flip(crashed_run / "snapshots" / newest / "rank00000.safetensors", -1)
    prefetch.main([str(crashed_run)])
    _, ckpt = attempt(crashed_run, epochs=3)
    assert str(ckpt._attempt.beginning.manifest.name) != newest


def test_a_file_is_opened_once_however_many_parts_it_is_read_in(crashed_run, monkeypatch):
    opened = []

    class Counting(Disk):
        def open_to_read(self, path, *, direct=False):
            opened.append((path.name, direct))
            return super().open_to_read(path, direct=direct)

    monkeypatch.setattr(run_url, "open_tier_at", lambda at: LocalTier(at, Counting()))
    monkeypatch.setattr(fetch, "GENTLE_BYTES", PAGE_BYTES)
    assert prefetch.main([str(crashed_run)]) == 0
    shards = [each for each in opened if each[0].endswith(".safetensors")]
    (file,) = (crashed_run / "snapshots" / usable(crashed_run)[-1]).glob("*.safetensors")
    assert file.stat().st_size > 2 * PAGE_BYTES
    assert shards == [(file.name, False)]


def test_the_snapshot_that_is_asked_for_is_the_one_that_is_brought(crashed_run):
    older = usable(crashed_run)[0]
    prefetch.main([str(crashed_run), older.partition("~")[0]])
    assert SharedMemoryDir.found(str(crashed_run)).folders() == [f"snapshots/{older}"]


def test_what_is_no_run_or_is_spoilt_brings_nothing_and_harms_nothing(crashed_run, tmp_path):
    assert prefetch.main([str(tmp_path / "none")]) == 0
    assert SharedMemoryDir.found(str(tmp_path / "none")) is None
    newest = crashed_run / "snapshots" / usable(crashed_run)[-1]
    next(newest.glob("*.safetensors")).unlink()
    assert prefetch.main([str(crashed_run)]) == 0
    shutil.rmtree(crashed_run / "snapshots")
    assert prefetch.main([str(crashed_run)]) == 0


def test_for_a_run_without_a_snapshot_nothing_is_left_in_memory(tmp_path):
    """Its command may have no Checkpointer, and then nothing would ever remove it."""
    attempt_history.found_run(LocalTier(tmp_path))
    assert prefetch.main([str(tmp_path)]) == 0
    assert SharedMemoryDir.found(str(tmp_path)) is None


@pytest.fixture
def fetching():
    """Starts a process that brings something into a run's memory, and takes its time."""
    code = """
        import sys, time
        from trainckpt.storage.shared_memory import SharedMemoryDir
        with SharedMemoryDir.of(sys.argv[1]).fetching():
            print("fetching", flush=True)
            time.sleep(600)
    """
    started = []

    def start(run):
        command = [sys.executable, "-c", textwrap.dedent(code), str(run)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"fetching\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_wait_for_what_is_on_its_way_and_for_nobody_who_is_dead(tmp_path, fetching):
    place = SharedMemoryDir.of(str(tmp_path))
    other = fetching(tmp_path)
    assert not place.wait_fetched(0.1)
    other.kill()
    assert place.wait_fetched(60.0)
    place.remove()


def test_a_run_that_waits_no_longer_says_so(crashed_run, fetching, caplog, monkeypatch):
    monkeypatch.setattr(host_cache, "FETCHED_WITHIN_S", 0.1)
    fetching(crashed_run)
    newest = usable(crashed_run)[-1]
    _, ckpt = attempt(crashed_run, epochs=3)
    assert f"reading {newest} without it" in caplog.text
    assert str(ckpt._attempt.beginning.manifest.name) == newest


def test_a_run_is_known_by_the_arguments_of_its_command(crashed_run, tmp_path):
    script = ["train.py", "--steps", "3"]
    assert likely_run([*script, "--run", str(crashed_run)]) == str(crashed_run)
    assert likely_run([*script, f"--run={crashed_run}"]) == str(crashed_run)
    assert likely_run([*script, "--run", crashed_run.name], str(crashed_run.parent)) == str(
        crashed_run
    )
    assert likely_run([*script, "--run", str(tmp_path / "new"), "\0", "x" * 5000]) is None


def test_the_launch_comes_first_at_the_disk_until_it_waits(tmp_path):
    """In a process of its own, as `beside` starts it; a rank that waits says so."""
    code = """
        import sys
        from trainckpt.launcher import prefetch
        from trainckpt.storage import libc
        from trainckpt.storage.shared_memory import SharedMemoryDir
        prefetch._give_way()
        memory = SharedMemoryDir.of(sys.argv[1])
        with memory.fetching(), prefetch._awaited(memory) as awaited:
            print(libc.is_idle(), awaited.is_set(), flush=True)
            awaited.wait(60)
            print(libc.is_idle(), awaited.is_set(), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as other:
        can = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
        assert other.stdout.readline() == f"{can} False\n"
        place = SharedMemoryDir.found(str(tmp_path))
        assert not place.is_awaited()
        assert place.wait_fetched(60.0)
        assert other.stdout.readline() == "False True\n"
    assert place.is_awaited()
    with place.fetching():
        assert not place.is_awaited(), "that was about another one"
    place.remove()
