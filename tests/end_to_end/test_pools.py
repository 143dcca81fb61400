"""A pool of the script's own in the loop, and a signal to the whole process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys, time
from concurrent.futures import ProcessPoolExecutor
from torch import nn
from trainckpt import Checkpointer
from trainckpt.stop import slow_stop
from tests.end_to_end.training import Parts
from tests.end_to_end.test_pools import work

slow_stop.WAITS_S = 0.5
kind, place, grace = sys.argv[1:]
parts = Parts()
with Checkpointer(place, **parts.tracked(), every="never", grace=grace or None) as ckpt:
    pool = multiprocessing.get_context("fork").Pool(2) if kind == "pool" else ProcessPoolExecutor(
        2, multiprocessing.get_context("fork"))
    for _ in ckpt.epochs(1000):
        for number, batch in enumerate(ckpt.batches()):
            parts.train_on(batch, number % 2)
            list(pool.map(work, range(4)))
"""


def work(number):
    """What a worker does meanwhile."""
    import time

    os.write(1, b"works\n")
    time.sleep(0.5)
    return number


def signalled(tmp_path, kind, number, grace=""):
    """Exit code and log of a run whose group gets the signal."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), kind, str(tmp_path / "run"), grace],
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        assert process.stdout.readline() == b"works\n"
        os.killpg(process.pid, number)
        return process.wait(60), log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["pool", pytest.param("executor", marks=pytest.mark.long)])
def test_ctrl_c_spares_the_workers_of_a_pool_so_that_the_boundary_is_reached(tmp_path, kind):
    code, log = signalled(tmp_path, kind, signal.SIGINT)
    assert code == 75, log
    assert "stopped by SIGINT" in log


def test_a_stop_that_waits_for_a_pool_whose_workers_sigterm_has_ended_says_so(tmp_path):
    code, log = signalled(tmp_path, "pool", signal.SIGTERM, "4 s")
    assert code == 71
    assert "not reached yet: the training thread waits in multiprocessing.pool. A SIGTERM" in log
