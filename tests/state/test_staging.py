"""Staging: the exact bytes of a plain safetensors file; hostile regions take no memory."""

from __future__ import annotations

import struct

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.state.helpers import bits, registry, shard_of
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.shard_file import Region
from trainckpt.state import captured as captured_state
from trainckpt.state.capture import capture
from trainckpt.state.captured import parse_values
from trainckpt.state.destination import Destination
from trainckpt.state.staging import (
    STREAM_BYTES,
    TensorsChanged,
    describe,
    stage,
    stream,
)
from trainckpt.state.values import UnknownValue
from trainckpt.storage.direct_io import populate, private_memory


@pytest.fixture
def one_thread():
    """As many as torch had, afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stored():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    model.register_buffer("empty", torch.zeros(3, 0))
    model.register_buffer("bf16", torch.randn(3).bfloat16())
    model.register_buffer("unsigned", torch.tensor([7, 2**16 - 1], dtype=torch.uint16))
    model.register_buffer("complex", torch.randn(3, dtype=torch.complex128))
    return model


def test_a_shard_file_is_read_by_the_plain_safetensors_library(tmp_path):
    model = stored()
    file = tmp_path / "rank00000.safetensors"
    file.write_bytes(b"".join(shard_of(registry(model=model)).blocks()))
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata().keys() == {"trainckpt"}
        for name, tensor in model.state_dict().items():
            found = opened.get_tensor(f"model/{name}")
            if tensor.dtype is torch.complex128:  # safetensors has no type for it
                found = found.view(torch.complex128).squeeze(-1)
            assert bits(found) == bits(tensor), name


def test_its_data_begins_at_a_page_and_has_no_gap_and_no_tail():
    shard = shard_of(registry(model=stored()))
    data = b"".join(shard.blocks())
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 4096 == 0
    at = 0
    for region in shard.header.regions:
        assert region.first_byte == at
        at += region.num_bytes
    assert len(data) == shard.num_bytes == 8 + length + at


def test_its_memory_is_used_again_and_holds_the_new_state():
    model = nn.Linear(3, 3)
    memory = private_memory(1 << 20)
    shard_of(registry(model=model), lambda num_bytes: memory[:num_bytes])
    nn.init.constant_(model.weight, 3.0)
    second = shard_of(registry(model=model), lambda num_bytes: memory[:num_bytes])
    assert second.head == memory[: second.header.header_bytes]
    assert bytes(second.data) == memory[second.header.header_bytes : second.num_bytes]
    assert struct.pack("<9f", *[3.0] * 9) in bytes(second.data)


def test_the_live_tensors_may_change_once_they_are_staged():
    model = nn.Linear(3, 3)
    shard = shard_of(registry(model=model))
    before = bytes(shard.data)
    nn.init.zeros_(model.weight)
    assert bytes(shard.data) == before


def whole_region(name, dtype, of, true_dtype=""):
    return Region(name, dtype, (0,) * len(of), of, of, true_dtype)


@pytest.mark.parametrize("of", [(2**62, 2**62), (2**50,), (2**62, 2**62, 0)])
def test_a_region_of_more_than_can_be_had_is_refused(of):
    region = whole_region("w", "F32", of)
    with pytest.raises(UnusableSnapshot):
        Destination({"w": None}).memory_for(region, region.box)


def test_bytes_that_cannot_be_of_their_type_are_refused():
    for true in ("complex128", "load", "quint8"):
        destination, region = Destination({"w": None}), whole_region("w", "U8", (3,), true)
        destination.memory_for(region, region.box)
        with pytest.raises(UnusableSnapshot):
            destination.finish({})


@pytest.mark.parametrize("values", [b"[]", b"{", b"[" * 100_000, b'{"a":1,"a":2}'])
def test_values_that_are_no_object_are_refused(values):
    with pytest.raises(UnusableSnapshot):
        parse_values(torch.frombuffer(bytearray(values), dtype=torch.uint8))


def test_a_tensor_of_which_a_part_was_not_read_is_refused():
    destination, region = Destination({"w": None}), Region("w", "U8", (0,), (3,), (9,))
    destination.memory_for(region, region.box)
    with pytest.raises(UnusableSnapshot, match="w: a part of it is missing"):
        destination.finish({})


def touched(num_bytes):
    """Memory whose pages are there, as an arena's are."""
    made = private_memory(num_bytes)
    populate(made)
    return made


@pytest.mark.parametrize("memory", [private_memory, touched])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_digested_as_it_is_copied_makes_the_same_file(num_threads, memory, one_thread):
    """Of several blocks, of one that is cut short, and of what is no run of bytes; and, where torch
    copies with more threads, not at all.
    """
    model = stored()
    for name, shape in [("w", (700, 999)), ("v", (33_000,)), ("u", (300, 300))]:
        model.register_buffer(name, torch.randn(shape))
    model.u = model.u.t()
    captured = capture(registry(model=model))
    regions = describe(captured, ())
    plain = stage(captured, regions, rank=0, world=1)
    torch.set_num_threads(num_threads)
    shard = stage(captured, regions, rank=0, world=1, digests=True, memory=memory)
    expected = {"model/w", "model/v"} if num_threads == 1 else set()
    assert shard.digests.keys() == expected
    assert shard.head == plain.head
    assert bytes(shard.memory) == bytes(plain.memory)


def streamed(model):
    captured = capture(registry(model=model))
    return stream(captured, describe(captured, ()), rank=0, world=1)


@pytest.mark.parametrize("extra", [0, 1, 5 * 2**20])
def test_a_streamed_file_is_the_staged_one_byte_for_byte(extra):
    """Also where its data is a whole number of buffers, and a little or much more."""
    model = stored()
    model.register_buffer("large", torch.zeros(0, dtype=torch.uint8))
    small = shard_of(registry(model=model)).header.data_bytes
    model.large = torch.randint(0, 255, (STREAM_BYTES - small + extra,), dtype=torch.uint8)
    copied = shard_of(registry(model=model))
    blocks = [bytes(block) for block in streamed(model).blocks()]
    assert len(blocks) == (2 if not extra else 3)
    assert b"".join(blocks) == b"".join(copied.blocks())


def test_tensors_that_change_while_they_are_streamed_are_noticed():
    """A worker that writes to shared memory, a thread that averages weights."""
    model = stored()
    blocks = streamed(model).blocks()
    next(blocks)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] += 1
    with pytest.raises(TensorsChanged, match=r"model/0\.weight changed while it was written"):
        list(blocks)


class Replay:
    def state_dict(self):
        return {"seen": bytes(8192)}

    def load_state_dict(self, state):
        pass


def test_more_values_than_a_resume_reads_are_not_saved(monkeypatch):
    monkeypatch.setattr(captured_state, "MAX_VALUES_BYTES", 4096)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    captured = capture(registry(replay=Replay(), scheduler=scheduler))
    with pytest.raises(UnknownValue, match=r"replay takes 1\d{4}; a resume reads at most 4096"):
        describe(captured, {})
