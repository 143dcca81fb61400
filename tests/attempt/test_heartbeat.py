"""The heartbeat: there while the attempt lives, gone after it, judged by the place's own clock."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time

import pytest

from tests.ranks.processes import context
from trainckpt.attempt import heartbeat
from trainckpt.attempt.heartbeat import Heartbeat, age_s, attempt_is_alive, path_of, read
from trainckpt.snapshot.attempt_history import read_attempts
from trainckpt.storage.local import LocalTier

FAST_S = 0.02


@pytest.fixture
def tier(tmp_path):
    (tmp_path / "attempts").mkdir()
    return LocalTier(tmp_path)


@pytest.fixture
def beating(tier):
    """A heartbeat of attempt 3, faster than a real one."""
    beat = Heartbeat(tier, 3, every_s=FAST_S)
    beat.start()
    wait_for(path_of(tier, 3).exists)
    yield beat
    beat.stop()


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def beats(tier):
    """How many were written; 0 between opening and writing the first."""
    return read(tier, 3).get("beat", 0)


def test_a_beat_tells_what_the_attempt_does(tier):
    """Also where a longer one stood before, and if that cannot be told."""
    said = iter([{"text": "x" * 1000}, {"text": "y"}])
    beat = Heartbeat(tier, 3, content=lambda: next(said), every_s=FAST_S)
    beat.start()
    wait_for(lambda: read(tier, 3).get("text") == "y" or beats(tier) > 2)
    wait_for(lambda: "StopIteration" in read(tier, 3).get("unknown", ""))
    assert attempt_is_alive(tier, 3)
    beat.stop()
    assert read(tier, 3) == {}


def test_a_beat_of_an_older_release_tells_nothing(tier):
    path_of(tier, 3).write_text("17\n")
    assert read(tier, 3) == {}
    path_of(tier, 3).write_text('{"beat": ')
    assert read(tier, 3) == {}


def test_it_is_written_again_and_again_and_gone_after_the_end(tier, beating):
    seen = beats(tier)
    wait_for(lambda: beats(tier) >= seen + 2)
    assert attempt_is_alive(tier, 3)
    assert path_of(tier, 3).stat().st_mode & 0o777 == 0o600
    beating.stop()
    assert not path_of(tier, 3).exists()
    assert age_s(tier, 3) is None
    assert not attempt_is_alive(tier, 3)
    beating.stop()


def test_no_heartbeat_is_no_sign_of_life_and_looking_leaves_nothing(tier):
    assert age_s(tier, 1) is None
    path_of(tier, 1).touch()
    assert age_s(tier, 1) < 5
    assert [path.name for path in tier.root.joinpath("attempts").iterdir()] == ["1.heartbeat"]


def test_an_old_one_is_dead_and_one_of_the_future_is_fresh(tier):
    path = path_of(tier, 1)
    path.touch()
    for moved_s, alive in ((-5.0, True), (-16.0, False), (3600.0, True)):
        moment = time.time() + moved_s
        os.utime(path, (moment, moment))
        assert attempt_is_alive(tier, 1) is alive
        assert age_s(tier, 1) == pytest.approx(max(0.0, -moved_s), abs=5.0)


def test_its_age_is_that_of_the_file_system_whatever_this_hosts_clock_says(tier, monkeypatch):
    path_of(tier, 1).touch()
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert age_s(tier, 1) < 5


def test_on_a_full_disk_its_age_is_seen_all_the_same(tier):
    """`prune` is what makes room there, and it asks who lives."""
    path_of(tier, 1).touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file may hold a byte
    try:
        assert age_s(tier, 1) < 5
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tier.root.joinpath("attempts").iterdir()] == ["1.heartbeat"]


def test_where_nothing_can_be_written_this_hosts_clock_has_to_do(tier, monkeypatch):
    path_of(tier, 1).touch()
    real = os.open

    def read_only(path, flags, *rest):
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    assert age_s(tier, 1) < 5


def test_a_write_that_fails_is_said_once_and_the_beat_goes_on(tier, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trainckpt"), "propagate", True)
    folder = tier.root / "attempts"
    folder.rename(tier.root / "elsewhere")
    beat = Heartbeat(tier, 3, every_s=FAST_S)
    beat.start()
    wait_for(lambda: caplog.records)
    time.sleep(5 * FAST_S)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not folder.exists()
    (tier.root / "elsewhere").rename(folder)
    wait_for(path_of(tier, 3).exists)
    beat.stop()
    assert len(caplog.records) == 1


def test_a_place_that_hangs_holds_up_neither_start_nor_stop(tier, monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr(heartbeat, "_write", lambda *_: let_go.wait(60))
    monkeypatch.setattr(heartbeat, "STOP_WITHIN_S", 0.1)
    beat = Heartbeat(tier, 3)
    begun = time.monotonic()
    beat.start()
    beat.stop()
    assert time.monotonic() - begun < 5
    let_go.set()


def test_it_is_no_record_of_an_attempt(tier, beating):
    assert read_attempts(tier) == {}


def _beat_until_killed(root, pipe):
    tier = LocalTier(root)
    Heartbeat(tier, 3, every_s=FAST_S).start()
    pipe.recv()


def test_after_a_kill_the_file_stays_and_grows_old(tier, monkeypatch):
    here, there = context.Pipe()
    process = context.Process(target=_beat_until_killed, args=(str(tier.root), there))
    process.start()
    wait_for(path_of(tier, 3).exists)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    here.close()
    assert attempt_is_alive(tier, 3)
    monkeypatch.setattr(heartbeat, "ALIVE_S", 0.1)
    wait_for(lambda: not attempt_is_alive(tier, 3))
    assert path_of(tier, 3).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_remove_its_parents_heartbeat(tier):
    beat = Heartbeat(tier, 3)
    beat.start()
    wait_for(path_of(tier, 3).exists)
    child = os.fork()
    if child == 0:
        beat.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path_of(tier, 3).exists()
    beat.stop()
    assert not path_of(tier, 3).exists()
