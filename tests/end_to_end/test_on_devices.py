"""Stopped inside a window and resumed, a training is the one that was never stopped; on a GPU too.

The same bodies run on the CPU where that means anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end import on_devices
from tests.end_to_end.on_devices import KINDS, ONLY_ON_A_GPU, Crash, Parts, attempt, difference
from tests.ranks.processes import preload, run_ranks
from trainckpt import Checkpointer
from trainckpt.save import copying
from trainckpt.save.copying import OVERLAP, PLAIN

preload("tests.end_to_end.on_devices")

VISIBLE = Path(__file__).parents[2] / "benchmarks/gpu/programs/visible.py"
SAVE_BYTES = 16 << 20
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(before)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


CASES = [("cpu", kind) for kind in KINDS if kind not in ONLY_ON_A_GPU]
CASES += [pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in KINDS]


@pytest.mark.parametrize(("device", "kind"), CASES, indirect=["device"])
def test_a_resumed_training_is_the_one_that_was_never_stopped(tmp_path, device, kind):
    straight = Parts(device, kind)
    expected, _ = attempt(tmp_path / "straight", straight)
    with pytest.raises(Crash):
        attempt(tmp_path / "run", Parts(device, kind), crash=True)
    resumed = Parts(device, kind)
    torch.rand(3, device=device)  # what a script draws before it resumes is undone
    lines, begun = attempt(tmp_path / "run", resumed)
    assert difference(expected, lines, begun, straight, resumed) == ""


@pytest.mark.parametrize("device", ["cpu", GPU], indirect=True)
@pytest.mark.parametrize("copies", [PLAIN, OVERLAP])
def test_saves_in_every_micro_batch_change_nothing_in_training(
    tmp_path, monkeypatch, device, copies
):
    monkeypatch.setattr(copying, "choose", lambda *_: copies)
    straight = Parts(device, "fused")
    expected, _ = attempt(tmp_path / "straight", straight)
    often = Parts(device, "fused")
    lines, _ = attempt(tmp_path / "often", often, every="1 steps")
    assert lines == expected
    assert often.state() == straight.state()


@pytest.mark.parametrize("device", ["cpu", GPU], indirect=True)
def test_ddp_ranks_that_share_a_device_go_on_exactly(tmp_path, device):
    """By gloo, which knows tensors on GPUs; replicas are stored once."""
    assert run_ranks(on_devices.of_ranks, 2, str(tmp_path), 2, device) == ["", ""]


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [PLAIN, OVERLAP])
def test_a_save_takes_little_of_the_gpu_s_memory(tmp_path, monkeypatch, copies):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(copying, "choose", lambda *_: copies)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]).cuda()  # 268 MB
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, peaks = torch.ones(4, 2048, device="cuda"), {False: [], True: []}
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every="never") as ckpt:
        for number in range(10):
            saves = number % 2 == 1
            save = ckpt.save() if saves else None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            ckpt.boundary()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if save is not None:
                save.wait("durable")
            torch.cuda.synchronize()
            peaks[saves].append(torch.cuda.max_memory_allocated())
    assert max(peaks[True]) - max(peaks[False]) <= SAVE_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("now", ["none", "the same"])
def test_a_run_goes_on_on_fewer_gpus(tmp_path, now):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if now == "none" else {}
    codes = []
    for kind, variables in (("cuda", {}), ("cuda" if now == "the same" else "cpu", hidden)):
        command = [sys.executable, str(VISIBLE), str(tmp_path / "run"), kind]
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        codes.append(done.returncode)
    assert codes == [1, 0], done.stderr
    assert '"resumed_from": 2' in done.stdout, done.stdout
    assert ("not bitwise" in done.stderr) == (now == "none")
