"""A loader worker that dies during the save of a stop costs nothing: no more batches are needed."""

from __future__ import annotations

import os
import signal
import time

import psutil

from tests.end_to_end.training import Parts, attempt, catalog
from trainckpt.notice import Notice

GONE_WITHIN_S = 60.0


class Killer:
    """Tracked state; to save it at the end kills a worker, and waits for the signal of that."""

    def __init__(self):
        self.armed, self.killed = False, []

    def state_dict(self):
        if self.armed and not self.killed:
            worker = next(c for c in psutil.Process().children() if "pt_data" in c.name())
            self.killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
            until_s = time.monotonic() + GONE_WITHIN_S
            while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            time.sleep(0.01)  # a handler of Python's runs between two lines of the main thread
        return {}

    def load_state_dict(self, state):
        pass


def test_a_worker_that_dies_during_the_save_of_a_stop_does_not_cost_it(tmp_path):
    parts = Parts(workers=2)
    parts.killer = Killer()
    before = signal.getsignal(signal.SIGCHLD)

    def inside(ckpt, _):
        if ckpt.cursor.micro_batches == 3:
            parts.killer.armed = True
            ckpt._listener.watcher.request(Notice("test", mode="micro-batch"))

    attempt(tmp_path, inside=inside, parts=parts, every="never", on_stop="return")

    (saved,) = [each.manifest for each in catalog(tmp_path) if each.usable]
    assert len(parts.killer.killed) == 1
    assert saved.cursor.micro_batches == 4
    assert before in (signal.SIG_DFL, signal.getsignal(signal.SIGCHLD))
