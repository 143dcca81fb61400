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

from tests.lifecycle.test_memory_tier import flip
from tests.lifecycle.training import attempt, crashed, usable
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.resuming import fetch_together
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE
from trainckpt.snapshot import blocks, fetch
from trainckpt.snapshot.attempts import run_id
from trainckpt.snapshot.catalog import load_manifest
from trainckpt.snapshot.vouched import NOTE, vouched
from trainckpt.supervisor import prefetch
from trainckpt.supervisor.command import likely_run
from trainckpt.tiers.direct import PAGE_BYTES
from trainckpt.tiers.disk import Disk
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.memory import MemoryPlace
from trainckpt.tiers.near import NearTier

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


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The end of the run that never stopped."""
    parts, _ = attempt(tmp_path_factory.mktemp("straight"), epochs=3)
    return parts.state()


@pytest.fixture
def launch(tmp_path_factory, monkeypatch):
    """The folder of a launch, as its ranks are told of it."""
    folder = tmp_path_factory.mktemp("launch")
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(folder))
    return folder


@pytest.fixture
def verified(monkeypatch):
    """Bytes of each run of blocks that was verified, by whomever."""
    found, is_good = [], blocks.Load.is_good

    def count(load, data):
        found.append(len(data))
        return is_good(load, data)

    monkeypatch.setattr(blocks.Load, "is_good", count)
    return found


def test_the_newest_snapshot_is_brought_and_read_from_there(crashed_run, straight, launch, caplog):
    assert prefetch.main([str(crashed_run), str(launch)]) == 0
    newest = usable(crashed_run)[-1]
    assert MemoryPlace.found(str(crashed_run)).folders() == [f"snapshots/{newest}"]
    with caplog.at_level(logging.INFO, "trainckpt"):
        parts, _ = attempt(crashed_run, epochs=3)
    assert f"{newest} was read from memory" in caplog.text
    assert parts.state() == straight


def test_what_was_verified_on_its_way_to_memory_is_not_verified_again(
    crashed_run, straight, launch, verified
):
    prefetch.main([str(crashed_run), str(launch)])
    once = sum(verified)
    parts, _ = attempt(crashed_run, epochs=3)
    assert sum(verified) == once > 0
    assert parts.state() == straight


def test_what_runs_beside_a_launch_leaves_its_note_in_the_folder_of_that(crashed_run, launch):
    variables = {**os.environ, SUPERVISOR_VARIABLE: str(launch)}
    with prefetch.beside(str(crashed_run), variables, None):
        until_s = time.monotonic() + 60.0
        while not (launch / NOTE).exists() and time.monotonic() < until_s:
            time.sleep(0.02)
    tier = LocalTier(crashed_run)
    newest = SnapshotName.parse(usable(crashed_run)[-1])
    found = vouched(launch, load_manifest(tier, run_id(tier), newest))
    assert list(found) == [f"snapshots/{newest}/rank00000.safetensors"]


def test_another_launch_verifies_all_of_it(crashed_run, straight, launch, verified, tmp_path):
    prefetch.main([str(crashed_run), str(tmp_path)])
    once = sum(verified)
    parts, _ = attempt(crashed_run, epochs=3)
    assert sum(verified) == 2 * once > 0
    assert parts.state() == straight


def test_what_was_written_to_since_is_verified_and_refused(crashed_run, straight, launch, caplog):
    prefetch.main([str(crashed_run), str(launch)])
    newest = usable(crashed_run)[-1]
    held = MemoryPlace.found(str(crashed_run)).root / "snapshots" / newest
    flip(held / "rank00000.safetensors", -1)
    parts, _ = attempt(crashed_run, epochs=3)
    assert f"{newest} in memory is not good" in caplog.text
    assert parts.state() == straight


def test_an_arena_that_was_filled_anew_is_not_what_was_verified(crashed_run, launch):
    """Through its mapping, which leaves the time of the last write as it was."""
    prefetch.main([str(crashed_run), str(launch)])
    place, newest = MemoryPlace.found(str(crashed_run)), usable(crashed_run)[-1]
    tier, key = LocalTier(crashed_run), f"snapshots/{newest}/rank00000.safetensors"
    near = NearTier(tier, place)
    near.vouched = vouched(launch, load_manifest(tier, run_id(tier), SnapshotName.parse(newest)))
    assert near.is_verified(key)
    near.close()
    arena = place.arena(0, 0)
    arena.reserve((place.root / key).stat().st_size)
    arena.memory[-1] ^= 1
    arena.publish(*key.rsplit("/", 1))
    arena.close()
    assert near.is_near(key)
    assert not near.is_verified(key)
    near.close()


def test_a_file_that_is_spoilt_in_its_place_is_not_vouched_for(crashed_run, launch, caplog):
    newest = usable(crashed_run)[-1]
    flip(crashed_run / "snapshots" / newest / "rank00000.safetensors", -1)
    prefetch.main([str(crashed_run), str(launch)])
    tier = LocalTier(crashed_run)
    assert vouched(launch, load_manifest(tier, run_id(tier), SnapshotName.parse(newest))) == {}
    _, ckpt = attempt(crashed_run, epochs=3)
    assert str(ckpt._attempt.beginning.manifest.name) != newest


@pytest.mark.parametrize(
    "note",
    [
        "", "[]", "{", '{"KEY": 1}', '{"KEY": ["DIGEST", [1]]}', '{"KEY": ["other", STAMP]}',
        '{"KEY": ["DIGEST", [1, 2, 3, 4, 5, Infinity]]}',
    ],
)  # fmt: skip
def test_a_note_that_is_none_says_nothing(crashed_run, launch, note):
    prefetch.main([str(crashed_run), str(launch)])
    tier = LocalTier(crashed_run)
    newest = SnapshotName.parse(usable(crashed_run)[-1])
    manifest = load_manifest(tier, run_id(tier), newest)
    ((key, stamp),) = vouched(launch, manifest).items()
    note = note.replace("KEY", key).replace("STAMP", str([*stamp]))
    (launch / NOTE).write_text(note.replace("DIGEST", manifest.files[0].header_digest))
    assert vouched(launch, manifest) == {}


def test_a_file_is_opened_once_however_many_parts_it_is_read_in(crashed_run, monkeypatch):
    opened = []

    class Counting(Disk):
        def open_to_read(self, path, *, direct=False):
            opened.append((path.name, direct))
            return super().open_to_read(path, direct=direct)

    monkeypatch.setattr(place, "open_other_place", lambda at: LocalTier(at, Counting()))
    monkeypatch.setattr(fetch, "GENTLE_BYTES", PAGE_BYTES)
    assert prefetch.main([str(crashed_run), str(crashed_run)]) == 0
    shards = [each for each in opened if each[0].endswith(".safetensors")]
    (file,) = (crashed_run / "snapshots" / usable(crashed_run)[-1]).glob("*.safetensors")
    assert file.stat().st_size > 2 * PAGE_BYTES
    assert shards == [(file.name, False)]


def test_the_snapshot_that_is_asked_for_is_the_one_that_is_brought(crashed_run):
    older = usable(crashed_run)[0]
    prefetch.main([str(crashed_run), str(crashed_run), older.partition("~")[0]])
    assert MemoryPlace.found(str(crashed_run)).folders() == [f"snapshots/{older}"]


def test_what_is_no_run_or_is_spoilt_brings_nothing_and_harms_nothing(crashed_run, tmp_path):
    assert prefetch.main([str(tmp_path / "none"), str(tmp_path)]) == 0
    assert MemoryPlace.found(str(tmp_path / "none")) is None
    newest = crashed_run / "snapshots" / usable(crashed_run)[-1]
    next(newest.glob("*.safetensors")).unlink()
    assert prefetch.main([str(crashed_run), str(tmp_path)]) == 0
    shutil.rmtree(crashed_run / "snapshots")
    assert prefetch.main([str(crashed_run), str(tmp_path)]) == 0


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
