"""Stage G: faults that a reading of the code predicted for GPUs; each probe passes or fails.

tf32         a Checkpointer can be made once fp32_precision is "tf32", and records it
visible      a run saved with a GPU goes on where none is visible
memory       GPU memory that survivors' moments take, beyond what training takes
hanging      a moment is whole while the stream that trains hangs
replicas     time to digest replicas, and every byte counts
growth       time to register an arena that has grown by a page
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.gpu.device import GB

import trainckpt
from trainckpt.format.cursor import Cursor
from trainckpt.ranks.store import local_store
from trainckpt.ranks.world import World
from trainckpt.state.captured import Captured
from trainckpt.state.device_copy import DeviceCopier
from trainckpt.state.registry import Registry
from trainckpt.state.step_state import read_small
from trainckpt.state.tensor_digests import group_digests
from trainckpt.storage.arena import Own
from trainckpt.survivors.step_history import StepHistory

if TYPE_CHECKING:
    from benchmarks.gpu.findings import Findings

VISIBLE = Path(__file__).parent / "programs/visible.py"
MOMENT_BYTES = 64e6
HANGS_S = 6.0
DIGEST_S_PER_GB = 0.05
GROWTH_SHARE, LEAST_GROWTH_S = 0.1, 0.005
PAGE = 4096
WINDOWS = 5


def run(findings: Findings, device: Any, folder: Path, ends: float) -> None:
    """Run every probe."""
    for probe in (tf32, replicas, growth, memory, hanging, visible):
        with findings.attempt(probe.__name__):
            probe(findings, device, folder)


def tf32(findings: Findings, device: Any, folder: Path) -> None:
    """Make a Checkpointer under torch 2.9's own setting of TF32."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        findings.add("tf32", None, why="torch before 2.9 has no such setting")
        return
    before, place = matmul.fp32_precision, folder / "tf32"
    matmul.fp32_precision = "tf32"
    try:
        model = torch.nn.Linear(1, 1, device=device.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trainckpt.Checkpointer(place, model=model, optimizer=optimizer) as ckpt:
            ckpt.boundary()
    finally:
        matmul.fp32_precision = before
    (manifest,) = place.glob("snapshots/*/manifest.json")
    recorded = json.loads(manifest.read_text())["fingerprint"]
    says_so = not device.on_card or "tf32" in json.dumps(recorded)
    findings.add("tf32", says_so, goal="recorded", passed=says_so, why=json.dumps(recorded))


def replicas(findings: Findings, device: Any, folder: Path) -> None:
    """Digest a large tensor that another rank should hold alike, and flip a byte of it."""
    tensor = torch.zeros(device.large_bytes, dtype=torch.uint8, device=device.torch_device)
    captured = Captured(tensors={"w": tensor}, groups={"w": "model parameters"})
    first = group_digests(captured, 0, 2)
    device.synchronize()
    begun = time.perf_counter()
    again = group_digests(captured, 0, 2)
    seconds = time.perf_counter() - begun
    findings.at_most("replicas", seconds / device.large_bytes * GB, "s/GB", DIGEST_S_PER_GB)
    tensor[-2] = 1
    sees = first == again != group_digests(captured, 0, 2)
    findings.add("replicas_sees_a_byte", sees, goal="sees it", passed=sees)


def growth(findings: Findings, device: Any, folder: Path) -> None:
    """Register an arena, and again when it has grown by a page."""
    said: list[str] = []
    side, arena = DeviceCopier(device.platform(), said.append), Own(None)  # type: ignore[arg-type]
    arena.keeps = side.keep
    side.use([torch.zeros(1, device=device.torch_device)])
    seconds = []
    try:
        for num_bytes in (device.registered_bytes, device.registered_bytes + PAGE):
            arena.reserve(num_bytes)
            begun = time.perf_counter()
            side.register(arena.memory)
            seconds.append(time.perf_counter() - begun)
    finally:
        side.close()
        arena.remove()
    if said:
        raise RuntimeError(said[0])
    findings.add("registered_first", seconds[0], "s")
    limit = max(GROWTH_SHARE * seconds[0], LEAST_GROWTH_S)
    findings.at_most("growth", seconds[1], "s", limit)


class Partner:
    """Keep another rank's own state, at once."""

    owners = ()

    def send(self, moment: Any) -> None:
        """It is safe."""
        moment.safe.set()


class Trained:
    """A model, its optimizer, and the moments that survivors would save."""

    def __init__(self, device: Any, num_bytes: int) -> None:
        torch.manual_seed(0)
        side = int((num_bytes / 4) ** 0.5)
        self.model = torch.nn.Linear(side, side, device=device.torch_device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.inputs = torch.ones(4, side, device=device.torch_device)
        self.train()
        registry = Registry()
        registry.add("model", self.model)
        registry.add("optimizer", self.optimizer)
        small: Any = Partner()
        self.moments = StepHistory(registry, local_store(World(0, 1, 0, "here")), small)

    def train(self) -> None:
        """Train one step."""
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def memory(findings: Findings, device: Any, folder: Path) -> None:
    """Compare the peak of GPU memory with a moment in each window to that without."""
    trained = Trained(device, device.large_bytes // 4)
    peaks = []
    for with_moments in (False, True):
        device.forget_peak()
        for window in range(WINDOWS):
            if with_moments:
                trained.moments.record(Cursor(step=window))
            trained.train()
        peaks.append(device.peak_bytes())
    off = trained.moments.why_off
    trained.moments.close()
    if off:
        raise RuntimeError(f"moments are off: {off}")
    findings.at_most("memory", peaks[1] - peaks[0], "bytes", MOMENT_BYTES)


def hanging(findings: Findings, device: Any, folder: Path) -> None:
    """Read a moment while the stream that trains does nothing for some seconds."""
    trained = Trained(device, device.large_bytes // 4)
    trained.moments.record(Cursor(step=1))
    trained.train()  # what copies is made by now
    trained.moments.record(Cursor(step=2))
    then = trained.model.weight.detach().clone()
    device.busy(HANGS_S)
    begun = time.perf_counter()
    trained.moments.freeze()
    with trained.moments.on_own_stream():
        moment = trained.moments.states()[-1]
        share = trained.moments.replicated.share(0)
        _ = moment.small.head
        shard, _entries = moment.file_of(0, 1, share, moment.small.memory)
        _ = shard.head
    seconds = time.perf_counter() - begun
    device.synchronize()
    found, _regions = read_small(shard.memory, "the shard file")
    same = torch.equal(found["model/weight"], then.cpu())
    trained.moments.close()
    findings.at_most("hanging", seconds, "s", HANGS_S / 2)
    findings.add("hanging_bytes_equal", same, goal="equal", passed=same)


def visible(findings: Findings, device: Any, folder: Path) -> None:
    """Go on without the GPU that a run was saved with."""
    place, attempts = folder / "visible", []
    for kind, variables in ((device.kind, {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        done = subprocess.run(
            [sys.executable, str(VISIBLE), str(place), kind],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        attempts.append((done, json.loads(done.stdout.splitlines()[0]) if done.stdout else {}))
    (_first, _), (second, found) = attempts
    good = second.returncode == 0 and found.get("resumed_from", 0) > 0
    findings.add("visible", good, goal="goes on", passed=good, why=second.stderr)
    if device.on_card:
        says_so = "not bitwise" in second.stderr
        findings.add("visible_says_so", says_so, goal="not bitwise", passed=says_so)
