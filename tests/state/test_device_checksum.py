"""Checksums of bytes that never leave their device see every change that a digest would see."""

from __future__ import annotations

import pytest
import torch

from trainckpt.state import tensor_digests
from trainckpt.state.captured import Captured
from trainckpt.state.tensor_digests import checksums, group_digests


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def one(tensor):
    return checksums([tensor])[0]


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 1000])
def test_each_bit_of_a_tensor_counts(num_bytes, device):
    data = torch.arange(num_bytes, dtype=torch.uint8, device=device)
    seen = {one(data)}
    for at in range(min(num_bytes, 20)):
        for bit in range(8):
            changed = data.clone()
            changed[at] ^= 1 << bit
            seen.add(one(changed))
    assert len(seen) == 1 + 8 * min(num_bytes, 20)


def test_the_order_and_the_number_of_bytes_count(device):
    zeros = [torch.zeros(n, dtype=torch.uint8, device=device) for n in range(20)]
    assert len(set(checksums(zeros))) == 20
    numbers = torch.arange(64.0, device=device)
    assert one(numbers) != one(numbers.flip(0))
    assert one(numbers.view(8, 8)) != one(numbers.view(8, 8).t())


def test_changes_of_high_bits_alone_do_not_cancel():
    """A sum of unmixed numbers would lose all but a few bits of these."""
    torch.manual_seed(0)
    weights = torch.randn(4096, dtype=torch.float64)
    seen = set()
    for number in range(300):
        changed = weights.clone()
        changed[number] *= -1
        changed[4095 - number] *= -1
        seen.add(one(changed))
    assert len(seen) == 300


def test_where_bytes_lie_and_how_they_are_cut_does_not_count(monkeypatch, device):
    data = torch.randint(0, 255, (1003,), dtype=torch.uint8, device=device)
    whole = one(data)
    shifted = torch.cat([data[:3], data])[3:]
    assert one(shifted) == whole
    assert one(data.view(-1, 17).t().contiguous().t()) == whole
    monkeypatch.setattr(tensor_digests, "CHUNK_BYTES", 64)
    assert one(data) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_tensors_of_any_type_have_one(dtype, device):
    data = torch.randint(0, 2, (33,), device=device).to(dtype)
    assert one(data) == one(data.clone())
    assert one(data) != one(torch.zeros_like(data))


@pytest.mark.gpu
def test_a_gpu_and_the_host_find_the_same_checksum():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    data = torch.randn(3_000_001)
    assert one(data.cuda()) == one(data)


@pytest.mark.gpu
def test_replicas_on_a_gpu_are_compared_without_bringing_them_back(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr("trainckpt.state.tensor_digests.bytes_of", None)
    good = torch.randn(1 << 20, device="cuda")
    drifted = good.clone()
    drifted[12345] += 1
    found = []
    for tensor in (good, good.clone(), drifted):
        captured = Captured(tensors={"w": tensor}, groups={"w": "model parameters"})
        found.append(group_digests(captured, 0, 2))
    assert found[0] == found[1] != found[2]
