"""A device of memory that the CPU sees, whose copies are made at the last moment that is allowed.

As a GPU's stream beside those that train: what `start` was given is copied when the training thread
waits for it, or when whatever it asks for next (`hold`) has to come behind it. Any other thread
waits until then. What was asked for on yet another stream (`asked`) is done when all is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

import torch

from trainckpt.state.device_copy import CudaCalls
from trainckpt.state.packed_copies import RUN_BYTES, pack

WITHIN_S = 60.0


class Copies:
    def __init__(self, runs):
        self._runs, self._done, self._lock = runs, threading.Event(), threading.Lock()

    def make(self):
        with self._lock:
            buffer = torch.empty(RUN_BYTES, dtype=torch.uint8, device="cpu")
            for run in self._runs:
                flat = pack(run, buffer)
                ctypes.memmove(run.target, flat.data_ptr(), flat.nbytes)
            self._runs = ()
        self._done.set()

    @property
    def are_made(self):
        return self._done.is_set()

    def wait(self):
        assert self._done.wait(WITHIN_S), "nobody waited, and no step was held back"


class SlowDevice(CudaCalls):
    """The simulated device.

    `locked`: address -> bytes; `refuses`: why nothing is locked; `fails_at`: number of the
    `start`, from 1, that raises when it has begun with all copies but the last.
    """

    kind, is_used = "cpu", True
    is_recording = has_recorded = False

    def __init__(self, refuses=""):
        self.locked, self.refuses = {}, refuses
        self.num_locked = self.held_back = 0
        self.copied = []  # bytes of each flight
        self.num_copies = 0
        self.num_finished = 0
        self.asked, self.fails_at, self.num_started = [], 0, 0
        self.set_apart = []  # thread, devices
        self.guarded = []  # names of threads that asked for something under `on`

    @contextlib.contextmanager
    def on(self, device):
        self.guarded.append(threading.current_thread().name)
        yield

    @contextlib.contextmanager
    def apart(self, devices):
        self.set_apart.append((threading.current_thread().name, set(devices)))
        yield

    def finish(self, device):
        self.num_finished += 1
        asked, self.asked = self.asked, []
        for each in asked:
            each()

    def register(self, address, num_bytes, device):
        assert not any(a < address + num_bytes and address < a + n for a, n in self.locked.items())
        if not self.refuses:
            self.locked[address] = num_bytes
            self.num_locked += 1
        return self.refuses

    def unregister(self, address, device):
        del self.locked[address]

    def start(self, device, runs):
        for run in runs:
            assert any(
                address <= run.target and run.target + run.num_bytes <= address + num_bytes
                for address, num_bytes in self.locked.items()
            )
        self.num_started += 1
        if self.num_started == self.fails_at:
            self.asked.append(Copies(runs[:-1]).make)
            raise RuntimeError("no memory for an event")
        self.copied.append(sum(run.num_bytes for run in runs))
        self.num_copies += len(runs)
        return Copies(runs)

    def wait(self, device, copies):
        if threading.current_thread() is threading.main_thread():
            copies.make()
        copies.wait()

    def is_over(self, copies):
        return copies.are_made

    def hold(self, device, copies):
        self.held_back += not copies.are_made
        copies.make()
