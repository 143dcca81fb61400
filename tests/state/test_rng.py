"""Random generators of devices go back by role; devices by a stand-in for torch.cuda."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace

import pytest
import torch

from trainckpt.resume import exactness_report
from trainckpt.state import apply
from trainckpt.state.adapters import rng
from trainckpt.state.captured import Captured, Saved
from trainckpt.state.registry import Registry

CPU = torch.device("cpu")


def cuda(*indices):
    return [torch.device("cuda", index) for index in indices]


class Gpus:
    """`torch.cuda` of so many visible GPUs, seeded alike as `torch.manual_seed` does."""

    def __init__(self, count, current=0, *, initialized=True):
        self.states = [(0, 0)] * count  # seed, how much was drawn
        self.current, self.initialized = current, initialized
        self.set_later = []

    def draw(self, index, number):
        self.states[index] = (self.states[index][0], number)
        return self

    def drawn(self):
        return [number for _, number in self.states]

    def is_initialized(self):
        return self.initialized

    def device_count(self):
        return len(self.states)

    def current_device(self):
        assert self.initialized, "this would take memory on the first GPU"
        return self.current

    def get_rng_state(self, device):
        packed = struct.pack("<QQ", *self.states[device.index])
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def set_rng_state(self, state, device):
        if not self.initialized:
            self.set_later.append((state, device))
            return
        index = self.current if device.index is None else device.index
        if index >= len(self.states):
            raise IndexError("tuple index out of range")
        self.states[index] = struct.unpack("<QQ", bytes(state.tolist()))

    def initialize(self, current):
        self.initialized, self.current = True, current
        for state, device in self.set_later:
            self.set_rng_state(state, device)


def captured(gpus, held):
    out = Captured()
    rng.capture(out, lambda: held, {"cuda": gpus})
    return Saved(
        {name: t.clone() for name, t in out.tensors.items()}, json.loads(json.dumps(out.values))
    )


def of_older_release(gpus):
    out = Captured()
    states = {
        f"cuda:{at}": gpus.get_rng_state(torch.device("cuda", at))
        for at in range(gpus.device_count())
    }
    values = {key: out.encode(value, f"rng/{key}") for key, value in states.items()}
    return Saved(out.tensors, {rng.PART: values})


def put_back(saved, gpus, held):
    """What was drawn on each GPU then, and what could not be put back."""
    lost = rng.not_put_back(saved, held, {"cuda": gpus})
    rng.apply(saved, held, {"cuda": gpus})
    return gpus.drawn(), lost


def stored(saved):
    return set(saved.values[rng.PART]) - {"python", "numpy", "torch"}


def test_a_ranks_own_generator_goes_back_to_its_own_device_whatever_its_number():
    saved = captured(Gpus(8, current=3).draw(3, 40), cuda(3))
    assert stored(saved) == {"cuda"}
    assert put_back(saved, Gpus(8, current=3), cuda(3)) == ([0, 0, 0, 40, 0, 0, 0, 0], [])
    assert put_back(saved, Gpus(1), cuda(0)) == ([40], []), "fewer GPUs are visible"
    assert put_back(saved, Gpus(4, current=1), cuda(1)) == ([0, 40, 0, 0], []), "in another order"


def test_the_device_that_holds_the_state_counts_not_the_current_one():
    """As in a script that never calls torch.cuda.set_device."""
    saved = captured(Gpus(2, current=0).draw(1, 40), [CPU, *cuda(1)])
    assert put_back(saved, Gpus(1), cuda(0)) == ([40], [])


def test_devices_of_one_process_are_told_apart_by_the_order_of_their_parameters():
    saved = captured(Gpus(3).draw(2, 20).draw(0, 30), cuda(2, 0))
    assert stored(saved) == {"cuda", "cuda_1"}
    assert put_back(saved, Gpus(2), cuda(0, 1)) == ([20, 30], [])
    drawn, lost = put_back(saved, Gpus(1), cuda(0))
    assert drawn == [20]
    why = "this rank trained on 2 cuda devices, and now on 1"
    assert lost == [f"{why}: not each has its random generator back"]
    one = captured(Gpus(1).draw(0, 20), cuda(0))
    drawn, lost = put_back(one, Gpus(2), cuda(0, 1))
    assert drawn == [20, 0]
    assert "trained on 1 cuda devices, and now on 2" in lost[0]


def test_another_device_that_was_drawn_from_goes_back_by_its_number_or_is_named():
    saved = captured(Gpus(3).draw(0, 20).draw(2, 50), cuda(0))
    assert stored(saved) == {"cuda", "cuda:2"}
    assert put_back(saved, Gpus(3), cuda(0)) == ([20, 0, 50], [])
    drawn, lost = put_back(saved, Gpus(2), cuda(0))
    assert drawn == [20, 0]
    assert lost[0].startswith("the random generator of cuda:2, which holds no tracked state, was")


def test_a_training_on_the_cpu_stores_the_current_devices_generator_once_it_drew_from_it():
    assert stored(captured(Gpus(2), [CPU])) == set()
    saved = captured(Gpus(2, current=1).draw(1, 30), [CPU])
    assert stored(saved) == {"cuda"}
    assert put_back(saved, Gpus(1), [CPU]) == ([30], [])
    assert stored(captured(Gpus(2, initialized=False), [CPU])) == set()


def test_a_generator_waits_for_the_device_where_none_has_been_used_yet():
    saved = captured(Gpus(2, current=1).draw(1, 30), [CPU])
    later = Gpus(4, initialized=False)
    assert put_back(saved, later, [CPU])[1] == []
    later.initialize(current=2)
    assert later.drawn() == [0, 0, 30, 0]


def test_what_has_no_device_here_is_named_in_the_resume_line():
    saved = captured(Gpus(1).draw(0, 30), cuda(0))
    assert rng.not_put_back(saved, [CPU], {}) == [
        "the cuda random generator was saved, and no cuda device is here"
    ]
    if torch.cuda.is_available():
        pytest.skip("here it can be put back")
    registry, beginning = Registry(), SimpleNamespace(saved=saved)
    assert len(exactness_report.said_by_objects(registry, beginning)) == 1
    saved.is_own = False  # then that is said of the rank itself
    assert apply.rng_not_put_back(registry, saved) == []


def test_an_older_releases_generators_go_back_by_number_to_as_many_devices():
    saved = of_older_release(Gpus(2).draw(0, 20).draw(1, 30))
    assert put_back(saved, Gpus(2), cuda(1)) == ([20, 30], [])


def test_of_an_older_releases_generators_the_one_that_was_drawn_from_is_this_ranks():
    saved = of_older_release(Gpus(8).draw(3, 40))
    assert put_back(saved, Gpus(1), cuda(0)) == ([40], [])
    assert put_back(of_older_release(Gpus(8)), Gpus(1), cuda(0)) == ([0], []), "seeded alike"
    unclear = of_older_release(Gpus(8).draw(3, 40).draw(4, 50))
    drawn, lost = put_back(unclear, Gpus(1), cuda(0))
    assert drawn == [0]
    assert lost == ["which of 8 saved cuda random generators was this rank's is not known"]


@pytest.mark.gpu
def test_a_real_gpus_generator_says_whether_it_was_drawn_from_and_goes_back():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.manual_seed(5)
    held = cuda(torch.cuda.current_device())
    assert not rng._was_drawn_from(torch.cuda.get_rng_state())
    torch.rand(5, device="cuda")
    assert rng._was_drawn_from(torch.cuda.get_rng_state())
    out = Captured()
    rng.capture(out, lambda: held)
    saved = Saved({name: t.clone() for name, t in out.tensors.items()}, out.values)
    after = torch.rand(5, device="cuda")
    assert rng.not_put_back(saved, held) == []
    rng.apply(saved, held)
    assert torch.equal(torch.rand(5, device="cuda"), after)
