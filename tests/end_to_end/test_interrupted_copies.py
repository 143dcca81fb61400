"""A signal handler of the script's raises while the training thread copies for a save."""

from __future__ import annotations

import ctypes
import signal
import threading
import time

import pytest
import torch

from tests.end_to_end.overlapped import Loop, Model, adam, as_saved
from trainckpt import Checkpointer
from trainckpt.save import coordinator, copying
from trainckpt.save.copying import OVERLAP
from trainckpt.state import overlapped_copy
from trainckpt.state.overlapped_copy import OverlappedCopy, PendingCopy
from trainckpt.stop import shutdown


class Memory:
    """Copies as memmove does; a signal comes while the main thread copies, or others hang."""

    def __init__(self):
        self.is_armed = False
        self.freed = threading.Event()
        self.freed.set()
        self.others_copy = threading.Event()

    def memmove(self, *args):
        ctypes.memmove(*args)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.001)  # so that the main thread finds chunks to copy
            self.others_copy.set()
            self.freed.wait(30.0)
        elif self.is_armed:
            self.is_armed = False
            signal.raise_signal(signal.SIGALRM)


@pytest.fixture
def memory(monkeypatch):
    memory = Memory()
    monkeypatch.setattr(overlapped_copy, "ctypes", memory)
    monkeypatch.setattr(overlapped_copy, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(copying, "choose", lambda *_: OVERLAP)
    for limit in ("NEARLY_S", "PATIENCE_S"):  # on a busy machine too no save is put off
        monkeypatch.setattr(coordinator, limit, 120.0)

    def late(*_):
        raise TimeoutError("an alarm of the script's")

    before = signal.signal(signal.SIGALRM, late)
    yield memory
    memory.freed.set()
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("by", ["training", "the save"])
def test_what_an_interrupted_thread_had_begun_to_copy_is_copied_by_the_next(memory, by):
    source = torch.randn(20_000)
    target = torch.zeros_like(source)
    one = OverlappedCopy([PendingCopy("w", source, target.data_ptr())], proves=True)
    for _ in range(3):
        memory.is_armed = True
        with pytest.raises(TimeoutError):
            one.fence()
    if by == "training":
        one.fence()
    assert list(one.run())[-1] == target.data_ptr() + target.nbytes
    assert torch.equal(source, target)
    assert one.changed == []


def test_a_step_that_an_alarm_interrupts_may_be_taken_again_and_spoils_no_snapshot(
    tmp_path, memory
):
    class Retrying(Loop):
        interrupted = 0

        def train(self, number):
            step = self.optimizers[0].step

            def again():
                memory.is_armed = True
                try:
                    step()
                except TimeoutError:
                    self.interrupted += 1
                    step()
                memory.is_armed = False

            self.optimizers[0].step = again
            try:
                super().train(number)
            finally:
                del self.optimizers[0].step

    model = Model()
    loop = Retrying(tmp_path, model, adam(model))
    assert loop.interrupted
    assert as_saved(tmp_path, loop) == 8


def test_a_script_that_an_alarm_ends_does_not_wait_for_copies_that_do_not_come(
    tmp_path, memory, monkeypatch
):
    """What is not copied by then is spoiled: the script may write to its tensors from there on."""
    monkeypatch.setattr(shutdown, "SAVE_IN_FLIGHT_S", 0.1)
    monkeypatch.setattr(overlapped_copy, "LEAVE_S", 0.1)
    model = Model()
    (optimizer,) = adam(model)
    ckpt = Checkpointer(tmp_path, model=model, optimizer=optimizer, every="never")
    memory.freed.clear()
    saves = []
    with pytest.raises(TimeoutError), ckpt:
        interrupted_step(ckpt, memory, optimizer, saves)
    (pending,) = saves
    assert not pending.ended
    model.words.weight.data.zero_()
    memory.freed.set()
    assert "changed between two optimizer steps" in str(error_of(pending))


def test_what_an_alarm_raises_inside_a_capture_reaches_the_script_and_the_next_save_is_taken(
    tmp_path, memory
):
    class Slow:
        is_slow = False

        def state_dict(self):
            if self.is_slow:
                signal.raise_signal(signal.SIGALRM)
            return {}

        def load_state_dict(self, state):
            pass

    model, slow = Model(), Slow()
    (optimizer,) = adam(model)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, slow=slow, every="never") as ckpt:
        slow.is_slow = True
        with pytest.raises(TimeoutError, match="an alarm of the script's"):
            ckpt.boundary()  # in the trial at the first one
        slow.is_slow = False
        ckpt.boundary()
        slow.is_slow = True
        failed = ckpt.save()
        with pytest.raises(TimeoutError, match="an alarm of the script's"):
            ckpt.boundary()
        assert failed.ended
        slow.is_slow = False
        taken = ckpt.save()
        ckpt.boundary()
        taken.wait("local")


def interrupted_step(ckpt, memory, optimizer, saves):
    saves.append(ckpt.save())
    ckpt.boundary()
    assert memory.others_copy.wait(20.0)
    memory.is_armed = True
    optimizer.step()


def error_of(pending, limit_s=20.0):
    until = time.monotonic() + limit_s
    while not pending.ended and time.monotonic() < until:
        time.sleep(0.01)
    return pending.error
