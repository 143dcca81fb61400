"""Bytes between devices and ordinary memory, through two buffers in turn."""

from __future__ import annotations

import pytest
import torch

from trainckpt.state import device_copy
from trainckpt.state.captured import Captured
from trainckpt.state.device_copy import brought_back, can_upload, on_host, upload
from trainckpt.state.staging import bytes_of, describe, digests_of, stream


def test_what_is_brought_back_is_every_byte_in_order(monkeypatch):
    monkeypatch.setattr(device_copy, "PART_BYTES", 1000)
    for size, begins in ((1001, [0, 1000, 2000]), (500, [0]), (0, [])):
        source = torch.randn(size).bfloat16()
        parts = [(at, bytes(bytes_of(part))) for at, part in brought_back(source)]
        assert b"".join(part for _, part in parts) == bytes_of(source)
        assert [at for at, _ in parts] == begins


def test_the_next_part_is_asked_for_before_the_caller_reads_the_one_before(monkeypatch):
    monkeypatch.setattr(device_copy, "PART_BYTES", 100)
    source = torch.zeros(400, dtype=torch.uint8)
    parts = brought_back(source)
    for number, (_, part) in enumerate(parts):
        source += 1  # it is not seen in the part that was asked for before
        assert part.unique().tolist() == [max(number - 1, 0)]


@pytest.mark.parametrize("part_bytes", [100, 1000, 1 << 20])
def test_uploaded_tensors_of_any_size_are_the_others_and_torch_is_told(monkeypatch, part_bytes):
    monkeypatch.setattr(device_copy, "PART_BYTES", part_bytes)
    sources = [torch.randn(n) for n in (0, 1, 24, 25, 26, 300, 7)]
    sources += [torch.rand(n) > 0.5 for n in (3, 1000)]
    sources += [torch.tensor(2.0), torch.randn(5, 3).bfloat16()]
    live = [torch.empty_like(source) for source in sources]
    before = [each._version for each in live]
    upload(zip(live, sources, strict=True))
    for into, source, version in zip(live, sources, before, strict=True):
        assert torch.equal(into, source)
        assert into._version > version or not into.numel()


@pytest.mark.gpu
def test_cuda_uploads_and_brings_back_every_byte_through_pinned_memory():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert device_copy.new_buffer(100, pinned=True).is_pinned()
    sizes = (1, 1000, device_copy.PART_BYTES // 4 - 3, 3 * device_copy.PART_BYTES // 4 + 5)
    sources = [torch.randn(size) for size in sizes]
    live = [torch.empty_like(source, device="cuda") for source in sources]
    assert all(can_upload(into, source) for into, source in zip(live, sources, strict=True))
    beside = torch.cuda.Stream()
    upload(zip(live, sources, strict=True))
    with torch.cuda.stream(beside):  # it waits for nothing
        doubled = [each * 2 for each in live]
    beside.synchronize()
    for into, source, twice in zip(live, sources, doubled, strict=True):
        assert torch.equal(on_host(into), source)
        assert torch.equal(twice.cpu(), source * 2)
    captured = Captured({f"t{number}": each for number, each in enumerate(live)})
    captured.tensors["turned"] = torch.randn(300, 200, device="cuda").t()
    torch.cuda.synchronize()
    on_cpu = Captured({name: each.cpu() for name, each in captured.tensors.items()})
    regions = describe(captured, ())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert digests_of(captured, regions) == digests_of(on_cpu, describe(on_cpu, ()))
    found = [
        b"".join(bytes(block) for block in stream(each, regions, rank=0, world=1).blocks())
        for each in (captured, on_cpu)
    ]
    assert found[0] == found[1]
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
