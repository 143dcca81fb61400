"""Signals to the group reach the main process once, and no worker; no worker is left behind."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading

import pytest
from torch.utils.data import DataLoader

from tests import warm
from tests.data.datasets import Plain, Stuck
from trainckpt.data.loader import TrackedLoader
from trainckpt.data.worker import SIGNALS, kill_workers, signals_blocked


@pytest.fixture
def run(server):
    """Run the helper program as the leader of its own session; return its lines."""

    def run(*arguments: str) -> list[str]:
        done = warm.run(server, ["-m", "tests.data.signalled", *arguments])
        assert done.returncode == 0, done.stderr
        assert _DELETED_ALREADY.sub("", done.stderr) == ""
        return done.stdout.splitlines()

    return run


# Python's own process that counts semaphores, where a killed worker had deleted one and not said so
# yet. One that is still there (a leak) has no second warning.
_DELETED_ALREADY = re.compile(
    r".*resource_tracker: There appear to be 1 leaked semaphore .*\n.*warnings\.warn.*\n"
    r".*resource_tracker: '/mp-\w+': \[Errno 2\] .*\n.*warnings\.warn.*\n"
)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("start", "number"),
    [("fork", "SIGTERM"), ("fork", "SIGUSR1"), ("spawn", "SIGTERM"), ("forkserver", "SIGTERM")],
)
def test_a_signal_to_the_group_kills_no_worker_and_is_seen_once(run, start, number):
    """Sent once while workers are half born, then twice in mid-epoch."""
    first, second = run(start, number)
    assert first == "[1, 2, 3] 20 [True, True]"
    assert second == "[-9, -9]"


@pytest.mark.parametrize("kind", ["kept", "per epoch"])
def test_a_process_that_just_ends_takes_its_workers_along(run, kind):
    """multiprocessing would join them for ever: they ignore its SIGTERM."""
    (line,) = run("leave", kind)
    assert all(gone(pid) for pid in json.loads(line))


def test_the_mask_is_put_back_and_what_waited_arrives():
    """Blocked, not ignored: nothing is lost to the main process."""
    seen = []
    old = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with signals_blocked("spawn"):
            # to this thread: one for the process may run in another, which blocks nothing
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            assert set(SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
            assert seen == []
        assert seen == [signal.SIGUSR2]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_killed_workers_are_reaped_and_a_new_pass_can_begin():
    """Leaving must not wait for what workers are busy with."""
    loader = DataLoader(Plain(), num_workers=2, multiprocessing_context="fork")
    tracked = TrackedLoader(loader, name="train")
    batches = iter(tracked)
    next(batches)
    iterator = tracked._source._last_iterator()
    kill_workers(iterator)
    assert [worker.exitcode for worker in iterator._workers] == [-signal.SIGKILL] * 2
    tracked.shutdown()
    assert sum(1 for _ in tracked) == len(loader)


def stuck_worker():
    """Return a loader whose one worker never finishes its first sample, and that worker's id."""
    told, tell = os.pipe()
    block, _never = os.pipe()
    loader = DataLoader(Stuck(tell, block), num_workers=1, multiprocessing_context="fork")
    tracked = TrackedLoader(loader, name="train")
    batches = tracked._begin()
    return tracked, batches, int.from_bytes(os.read(told, 8), "little")


def test_an_abandoned_iterator_does_not_leave_a_busy_worker_behind():
    """torch waits 5 s, sends SIGTERM, which is ignored: SIGKILL takes its place."""
    tracked, batches, pid = stuck_worker()
    del batches
    gc.collect()
    assert gone(pid)
    assert not tracked.exhausted


def test_shutdown_does_not_wait_for_a_busy_worker():
    """Used when leaving, with seconds left."""
    tracked, _batches, pid = stuck_worker()
    tracked.shutdown()
    assert gone(pid)
