"""Memory that a device writes to by itself: what is locked, what is taken, what is waited for."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from tests.state.slow_device import SlowDevice
from trainckpt.state import packed_copies
from trainckpt.state.captured import Captured
from trainckpt.state.device_copy import AsyncCopies, CudaCalls, DeviceCopier, finish
from trainckpt.state.staging import bytes_of, describe, stage
from trainckpt.storage.direct_io import private_memory
from trainckpt.storage.shared_memory import SharedMemoryDir

SIZE = 4 * mmap.PAGESIZE


@pytest.fixture
def memory():
    return private_memory(SIZE)


def begin(memory):
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def used(device):
    device_copier = DeviceCopier(device)
    device_copier.use([torch.ones(3)])
    return device_copier


def test_nothing_is_locked_before_a_device_holds_state(memory):
    device = SlowDevice()
    device_copier = DeviceCopier(device)
    device_copier.register(memory)
    device_copier.use([torch.ones(3, device="meta")])
    device_copier.register(memory)
    assert device.locked == {}
    device_copier.use([torch.ones(3)])
    device_copier.register(memory)
    assert device.locked == {begin(memory): SIZE}


def test_of_memory_that_grew_the_new_pages_are_locked_and_no_others(memory):
    device = SlowDevice()
    device_copier, first = used(device), begin(memory)
    device_copier.register(memory[: mmap.PAGESIZE + 1])  # locks two pages
    assert device.locked == {first: 2 * mmap.PAGESIZE}
    device_copier.register(memory[: mmap.PAGESIZE + 2])
    device_copier.register(memory)
    device_copier.register(memory)
    assert device.locked == {
        first: 2 * mmap.PAGESIZE,
        first + 2 * mmap.PAGESIZE: SIZE - 2 * mmap.PAGESIZE,
    }
    assert device.num_locked == 2


def test_a_range_that_loses_pages_is_locked_anew_before_it_is_written_to(memory):
    device = SlowDevice()
    device_copier, first = used(device), begin(memory)
    half = torch.ones(SIZE // 2, dtype=torch.uint8)
    device_copier.register(memory[: SIZE // 2])
    device_copier.register(memory)
    device_copier.keep(memory, SIZE // 2)
    assert device_copier.takes(half, first)
    assert not device_copier.takes(half, first + SIZE // 2)
    device_copier.register(memory)
    assert device_copier.takes(half, first + SIZE // 2)
    assert device.num_locked == 3
    device_copier.keep(memory, SIZE // 4)
    assert device.locked == {}


def test_a_copy_to_two_locked_ranges_is_made_in_two(memory):
    device = SlowDevice()
    device_copier, first = used(device), begin(memory)
    device_copier.register(memory[: SIZE // 2])
    device_copier.register(memory)
    source = torch.arange(SIZE // 4, dtype=torch.int16)
    at = first + SIZE // 4
    assert device_copier.takes(source, at)
    device_copier.copy([(at, source), (at + source.nbytes, source[:8])])
    assert device.num_copies == 2 + 1  # each checked by the device: it lies in one range
    assert bytes(memory[SIZE // 4 : SIZE // 4 + source.nbytes]) == bytes_of(source)
    assert bytes(memory[SIZE // 4 + source.nbytes :][:16]) == bytes_of(source[:8])


@pytest.mark.parametrize(("buffer_kb", "num_runs"), [(500, 1 + 1), (300, 2 + 1)])
def test_small_tensors_are_copied_together_and_large_ones_alone(monkeypatch, buffer_kb, num_runs):
    """Two large ones lie between small ones of 4 bytes an item, and those of one byte."""
    monkeypatch.setattr(packed_copies, "RUN_BYTES", buffer_kb << 10)
    device, captured = SlowDevice(), Captured()
    device_copier, memory = used(device), private_memory(4 << 20)
    for number in range(200):
        captured.tensors[f"n{number:03}"] = torch.randn(number * 5 + 1)
        captured.tensors[f"n{number:03}b"] = torch.randint(2, (number, 3), dtype=torch.bool)
    captured.tensors["n100_large"] = torch.randn((17 << 10) + 1)
    captured.tensors["n150_large"] = torch.randn((17 << 10) + 1)
    regions = describe(captured, ())
    device_copier.register(memory)
    how = {"rank": 0, "world": 1, "memory": lambda num_bytes: memory[:num_bytes]}
    staged = bytes(stage(captured, regions, device_copier=device_copier, **how).memory)
    assert device.num_copies == 2 + num_runs
    memory[:] = bytes(len(memory))
    alone = stage(captured, regions, **how)
    assert bytes(alone.memory) == staged


def test_only_what_lies_in_one_run_and_goes_to_locked_memory_is_taken(memory):
    device_copier, first = used(SlowDevice()), begin(memory)
    square = torch.ones(8, 8)
    assert not device_copier.takes(square, first)
    device_copier.register(memory)
    assert device_copier.takes(square, first)
    assert not device_copier.takes(square.t(), first)
    assert not device_copier.takes(square.to("meta"), first)
    assert not device_copier.takes(square, first + SIZE - square.nbytes + 1)


@pytest.mark.parametrize(
    "end", [lambda device_copier, memory: device_copier.keep(memory, 0), lambda s, _: s.close()]
)
def test_copies_of_a_save_that_failed_are_over_before_its_memory_goes(memory, end):
    device = SlowDevice()
    device_copier, source = used(device), torch.arange(64, dtype=torch.uint8)
    device_copier.register(memory)
    flight = device_copier.start([(begin(memory), source)])
    assert not flight.is_over
    end(device_copier, memory)
    assert flight.is_over
    assert bytes(memory[:64]) == bytes_of(source)
    assert device.locked == {}
    assert not device_copier.takes(source, begin(memory))


def test_nothing_is_copied_into_an_arena_while_the_save_before_is_still_at_it(memory):
    device_copier, source = used(SlowDevice()), torch.ones(64)
    device_copier.register(memory)
    flight = device_copier.start([(begin(memory), source)])
    stage(Captured(), (), rank=0, world=1, device_copier=device_copier)
    assert flight.is_over


def test_a_copy_that_the_device_refuses_is_made_as_ever_and_nothing_writes_to_its_place_later(
    memory,
):
    device, said, first = SlowDevice(), [], begin(memory)
    device_copier = DeviceCopier(device, said.append)
    sources = [torch.full((64,), number, dtype=torch.uint8) for number in (1, 2)]
    device_copier.use(sources)
    device_copier.register(memory)
    device_copier.start([(first, sources[0])])  # by itself, and still at it when the next one fails
    device.fails_at = 2
    flight = device_copier.start([(first + 64, sources[0]), (first + 128, sources[1])])
    assert flight.is_over
    assert device.asked == []
    assert bytes(memory[64:192]) == bytes(64 * [1] + 64 * [2])
    device_copier.copy([(first + 64, sources[1])])
    assert bytes(memory[64:128]) == bytes(64 * [2])
    assert device.num_started == 2
    assert len(said) == 1
    assert "no memory for an event" in said[0]


def test_where_one_device_fails_the_copies_of_the_one_before_are_waited_for_as_well(memory):
    device, finished = SlowDevice(), []
    device.finish = finished.append
    device.locked = {begin(memory): SIZE}
    device.fails_at = 2
    here, there = torch.ones(64, dtype=torch.uint8), torch.ones(64, device="meta")
    flight = AsyncCopies(device, [(begin(memory), here), (begin(memory), there)])
    with pytest.raises(RuntimeError, match="no memory"):
        flight.start()
    flight.wait()
    assert bytes(memory[:64]) == bytes_of(here)
    assert finished == [there.device]


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="Linux alone")
def test_a_forked_process_has_no_page_that_a_device_writes_to(memory):
    assert "dc" not in flags_of(begin(memory))
    used(SlowDevice()).register(memory)
    assert "dc" in flags_of(begin(memory))


def flags_of(address):
    """What /proc/self/smaps says of the mapping that holds it."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            low, high = (int(end, 16) for end in words[0].split("-"))
            is_it = low <= address < high
        elif is_it and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"{address:x} is not mapped")


def test_once_a_graph_was_recorded_all_is_copied_at_the_boundary(memory):
    device, captured = SlowDevice(), Captured({"w": torch.ones(64)})
    regions, device_copier = describe(captured, ()), used(device)
    how = {"rank": 0, "world": 1, "later": {"w"}, "device_copier": device_copier}
    how["memory"] = lambda num_bytes: (device_copier.register(memory), memory[:num_bytes])[1]
    assert [piece.tensor for piece in stage(captured, regions, **how).rest] == ["w"]
    device.is_recording = True
    assert device_copier.is_recording()
    device.is_recording = False
    assert stage(captured, regions, **how).rest == []
    assert not device_copier.is_recording()


@pytest.mark.gpu
def test_cuda_locks_memory_writes_to_it_and_refuses_without_a_trace(memory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    source = torch.randn(SIZE // 4, device="cuda")
    said = []
    device_copier = DeviceCopier(CudaCalls(), said.append)
    device_copier.use([source])
    device_copier.register(memory)
    assert said == []
    place = torch.frombuffer(memory, dtype=torch.float32)
    assert place.is_pinned()
    flight = device_copier.start([(place.data_ptr(), source)])
    flight.hold()
    source.zero_()  # behind the copy
    flight.wait()
    assert flight.is_over
    assert place.abs().sum() > 0
    device_copier.copy([(place.data_ptr(), source)])
    assert place.abs().sum() == 0
    device_copier.close()
    assert not place.is_pinned()
    nowhere = (ctypes.c_ubyte * SIZE).from_address(mmap.PAGESIZE)
    device_copier.register(memoryview(nowhere).cast("B"))
    assert len(said) == 1
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(10**9)  # cycles
    assert not beside.query()
    finish([source])
    assert beside.query()
    source.add_(1.0)  # a kernel of this thread reports no failure of before
    torch.cuda.synchronize()


class Counting(CudaCalls):
    """Notes what is locked, and how many copies each save takes."""

    def __init__(self):
        super().__init__()
        self.ranges, self.num_runs = [], []

    def register(self, address, num_bytes, device):
        self.ranges.append((address, num_bytes))
        return super().register(address, num_bytes, device)

    def start(self, device, runs):
        self.num_runs.append(len(runs))
        return super().start(device, runs)


@pytest.mark.gpu
def test_cuda_packs_small_tensors_in_a_bounded_buffer_and_the_file_is_the_same(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda, captured = Counting(), Captured()
    torch.manual_seed(0)
    for number in range(3000):
        size = 1 + (number * 37) % 9000
        captured.tensors[f"t{number:04}"] = torch.randn(size, device="cuda")
        captured.tensors[f"t{number:04}b"] = torch.rand(size % 101, device="cuda") > 0.5
    captured.tensors["t1500_large"] = torch.randn(40 << 18, device="cuda").bfloat16()
    place = SharedMemoryDir.of(str(tmp_path))
    arena, said = place.arena(0, 0), []
    device_copier = DeviceCopier(cuda, said.append)
    device_copier.use(captured.tensors.values())
    arena.keeps = device_copier.keep
    regions = describe(captured, ())

    def memory(num_bytes):
        arena.reserve(num_bytes, spare=True)
        device_copier.register(arena.reserved)
        return arena.memory

    for add_bytes in (0, 1000, 8 << 20):  # the last goes behind the end of the locked range
        captured.tensors["zz"] = torch.ones(add_bytes, dtype=torch.uint8, device="cuda")
        regions = describe(captured, ())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        shard = stage(
            captured, regions, rank=0, world=1, memory=memory, device_copier=device_copier
        )
        assert torch.cuda.max_memory_allocated() - before <= 64 << 20
        on_host = {n: t.cpu() for n, t in captured.tensors.items()}
        assert shard.data == stage(Captured(on_host), regions, rank=0, world=1).data
    assert said == []
    assert max(cuda.num_runs) < 30
    assert len(cuda.ranges) == 2
    assert cuda.ranges[1][0] == sum(cuda.ranges[0])  # what was new, behind what was there
    device_copier.close()
    arena.close()
    place.remove()
