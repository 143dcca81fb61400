"""Which core is kept free for a process that computes: the rule, and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainckpt.tiers import other_cores
from trainckpt.tiers.other_cores import OtherCores, Seen, look, to_use

LIMIT_S = 30.0
ALL = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()

pytestmark = pytest.mark.skipif(look(os.getpid()) is None, reason="no /proc that says it")
two_cores = pytest.mark.skipif(len(ALL) < 2, reason="it takes two cores")


def seen(core: int, ran_s: float, at_s: float) -> Seen:
    return Seen(core, ran_s, at_s)


@pytest.mark.parametrize(
    ("before", "now", "used"),
    [
        (seen(0, 5.0, 1.0), seen(0, 5.9, 2.0), {1, 2}),  # computes
        (seen(0, 5.0, 1.0), seen(2, 5.9, 2.0), {0, 1}),  # and has moved
        (seen(0, 5.0, 1.0), seen(0, 5.5, 2.0), {1, 2}),  # half of the time
        (seen(0, 5.0, 1.0), seen(0, 5.4, 2.0), {0, 1, 2}),  # waits, more often than not
        (seen(0, 5.0, 1.0), seen(7, 5.9, 2.0), {0, 1, 2}),  # on a core that is not ours to use
        (None, seen(0, 5.9, 2.0), {0, 1, 2}),
        (seen(0, 5.0, 1.0), None, {0, 1, 2}),  # it is gone
    ],
)
def test_the_core_of_a_thread_that_computes_is_not_used(before, now, used):
    """Where it waits, or nobody knows, all are."""
    assert to_use(frozenset({0, 1, 2}), before, now) == used


def test_who_has_one_core_shares_it():
    """Nothing is left of it otherwise."""
    assert to_use(frozenset({0}), seen(0, 5.0, 1.0), seen(0, 6.0, 2.0)) == {0}


def process(text: str) -> subprocess.Popen:
    running = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    running.stdout.readline()  # it has begun
    return running


@two_cores
def test_a_process_that_computes_has_its_core_for_itself():
    """Threads that are there leave it, new ones begin elsewhere; afterwards all may be used."""
    core = min(ALL)
    with process(f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\n"
                 "while True: pass") as running:  # fmt: skip
        try:
            with OtherCores(running.pid).kept_off():
                until, found = time.monotonic() + LIMIT_S, set()
                while found != ALL - {core}:  # it may have to share its core just now
                    assert time.monotonic() < until
                    with ThreadPoolExecutor(1) as new:
                        found = new.submit(os.sched_getaffinity, 0).result()
            assert os.sched_getaffinity(0) == ALL
        finally:
            running.kill()


@two_cores
def test_beside_a_process_that_waits_all_cores_are_used(monkeypatch):
    """As beside training that waits for its last save."""
    looks, enough = [], threading.Event()

    def counted(pid):
        looks.append(look(pid))
        if len(looks) > 5:
            enough.set()
        return looks[-1]

    monkeypatch.setattr(other_cores, "look", counted)
    moved = []
    monkeypatch.setattr(other_cores, "_use", moved.append)
    with process("import time\nprint(flush=True)\ntime.sleep(60)") as running:
        try:
            with OtherCores(running.pid).kept_off():
                assert enough.wait(LIMIT_S)
        finally:
            running.kill()
    assert None not in looks
    assert moved == []


def test_a_process_that_is_gone_is_in_nobodys_way():
    """Its rank died: whoever writes finds that out elsewhere."""
    with process("print()") as gone:
        gone.wait()
    with OtherCores(gone.pid).kept_off():
        assert frozenset(os.sched_getaffinity(0)) == ALL
