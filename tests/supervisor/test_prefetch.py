"""What a run will most likely begin from is in memory before its ranks ask for it."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.lifecycle.training import attempt, crashed, usable
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.resuming import fetch_together
from trainckpt.snapshot import fetch
from trainckpt.supervisor import prefetch
from trainckpt.supervisor.command import likely_run
from trainckpt.tiers.direct import PAGE_BYTES
from trainckpt.tiers.disk import Disk
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.memory import MemoryPlace

CRASH_AT = 9


@pytest.fixture
def crashed_run(tmp_path):
    """A run whose memory is gone, as after a restart of its host."""
    crashed(tmp_path, CRASH_AT, epochs=3)
    MemoryPlace.found(str(tmp_path)).remove()
    yield tmp_path
    place = MemoryPlace.found(str(tmp_path))
    if place is not None:
        place.remove()


def test_the_newest_snapshot_is_brought_and_read_from_there(crashed_run, tmp_path_factory, caplog):
    straight, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=3)
    assert prefetch.main([str(crashed_run)]) == 0
    newest = usable(crashed_run)[-1]
    assert MemoryPlace.found(str(crashed_run)).folders() == [f"snapshots/{newest}"]
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, _ = attempt(crashed_run, epochs=3)
    assert f"{newest} was read from memory" in caplog.text
    assert parts.state() == straight.state()


def test_a_file_is_opened_once_however_many_parts_it_is_read_in(crashed_run, monkeypatch):
    opened = []

    class Counting(Disk):
        def open_to_read(self, path, *, direct=False):
            opened.append((path.name, direct))
            return super().open_to_read(path, direct=direct)

    monkeypatch.setattr(place, "open_other_place", lambda at: LocalTier(at, Counting()))
    monkeypatch.setattr(fetch, "GENTLE_BYTES", PAGE_BYTES)
    assert prefetch.main([str(crashed_run)]) == 0
    shards = [each for each in opened if each[0].endswith(".safetensors")]
    (file,) = (crashed_run / "snapshots" / usable(crashed_run)[-1]).glob("*.safetensors")
    assert file.stat().st_size > 2 * PAGE_BYTES
    assert shards == [(file.name, False)]


def test_the_snapshot_that_is_asked_for_is_the_one_that_is_brought(crashed_run):
    older = usable(crashed_run)[0]
    prefetch.main([str(crashed_run), older.partition("~")[0]])
    assert MemoryPlace.found(str(crashed_run)).folders() == [f"snapshots/{older}"]


def test_what_is_no_run_or_is_spoilt_brings_nothing_and_harms_nothing(crashed_run, tmp_path):
    assert prefetch.main([str(tmp_path / "none")]) == 0
    assert MemoryPlace.found(str(tmp_path / "none")) is None
    newest = crashed_run / "snapshots" / usable(crashed_run)[-1]
    next(newest.glob("*.safetensors")).unlink()
    assert prefetch.main([str(crashed_run)]) == 0
    shutil.rmtree(crashed_run / "snapshots")
    assert prefetch.main([str(crashed_run)]) == 0


@pytest.fixture
def fetching():
    """Starts a process that brings something into a run's memory, and takes its time."""
    code = """
        import sys, time
        from trainckpt.tiers.memory import MemoryPlace
        with MemoryPlace.of(sys.argv[1]).fetching():
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
    place = MemoryPlace.of(str(tmp_path))
    other = fetching(tmp_path)
    assert not place.wait_fetched(0.1)
    other.kill()
    assert place.wait_fetched(60.0)
    place.remove()


def test_a_run_that_waits_no_longer_says_so(crashed_run, fetching, caplog, monkeypatch):
    monkeypatch.setattr(fetch_together, "FETCHED_WITHIN_S", 0.1)
    fetching(crashed_run)
    newest = usable(crashed_run)[-1]
    _, ckpt = attempt(crashed_run, epochs=3)
    assert f"{newest} is read without waiting for it any longer" in caplog.text
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
        from trainckpt.supervisor import prefetch
        from trainckpt.tiers import io_priority
        from trainckpt.tiers.memory import MemoryPlace
        prefetch._give_way()
        memory = MemoryPlace.of(sys.argv[1])
        with memory.fetching(), prefetch._awaited(memory) as awaited:
            print(io_priority.is_idle(), awaited.is_set(), flush=True)
            awaited.wait(60)
            print(io_priority.is_idle(), awaited.is_set(), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as other:
        can = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
        assert other.stdout.readline() == f"{can} False\n"
        place = MemoryPlace.found(str(tmp_path))
        assert not place.is_awaited()
        assert place.wait_fetched(60.0)
        assert other.stdout.readline() == "False True\n"
    assert place.is_awaited()
    with place.fetching():
        assert not place.is_awaited(), "that was about another one"
    place.remove()
