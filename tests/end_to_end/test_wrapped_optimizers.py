"""Wrappers that hide an optimizer: its steps are counted, and its state resumes exactly."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.end_to_end.training import Crash
from trainckpt import Checkpointer
from trainckpt.state.registry import Registry


class Momentum(torch.optim.Optimizer):
    """SGD with float32 momentum, whatever the parameters are."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("momentum", torch.zeros(p.shape))
                p.sub_(group["lr"] * kept.mul_(0.9).add_(p.grad))


class Warmup:
    """As the optimizer of the annotated Transformer: no torch optimizer, and a state of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.calls += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * self.calls
        self.optimizer.step()

    def state_dict(self):
        return {"calls": self.calls, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        self.optimizer.load_state_dict(state["optimizer"])


class Slow(torch.optim.Optimizer):
    """As Lookahead's: an optimizer that steps by another, and has weights of its own."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.copy_(slow.lerp_(p, 0.5))


def with_fabric(model, optimizer):
    lightning = pytest.importorskip("lightning")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    return fabric.setup(model, optimizer)


def with_accelerate(model, optimizer):
    optimizers = pytest.importorskip("accelerate.optimizer")
    states = pytest.importorskip("accelerate.state")
    states.AcceleratorState._reset_state(reset_partial_state=True)
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    return model, optimizers.AcceleratedOptimizer(optimizer)


def with_a_warm_up(model, optimizer):
    return model, Warmup(optimizer)


def with_slow_weights(model, optimizer):
    return model, Slow(optimizer)


def train(place, wrap, crash_at=None):
    """The README's loop, windows of 3; losses by micro-batch, and the Checkpointer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.bfloat16)
    data = torch.randn(24, 4, dtype=torch.bfloat16)
    inner = Momentum(model.parameters(), 0.05)
    model, optimizer = wrap(model, inner)
    losses = {}
    loader = torch.utils.data.DataLoader(data, 2)
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="1 steps"
    ) as ckpt:
        for _ in ckpt.epochs(1):
            for x in ckpt.batches():
                at = ckpt.cursor
                if at.micro_batches == crash_at:
                    raise Crash
                loss = model(x).float().square().mean()
                loss.backward()
                if at.micro == 2:
                    optimizer.step()
                    optimizer.zero_grad()
                losses[at.micro_batches] = loss.item().hex()
        moments = [s["momentum"].tolist() for s in inner.state.values()]
    return losses, ckpt, moments


pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available")
WRAPS = [with_fabric, with_accelerate, with_a_warm_up, with_slow_weights]


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_steps_of_the_optimizer_inside_are_counted(tmp_path, wrap):
    _, ckpt, _ = train(tmp_path, wrap)
    assert (ckpt.cursor.step, ckpt.cursor.micro) == (4, 0)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_run_with_it_resumes_exactly(tmp_path, wrap, caplog):
    caplog.set_level(logging.INFO, "trainckpt")
    straight, _, moments = train(tmp_path / "straight", wrap)
    with pytest.raises(Crash):
        train(tmp_path / "run", wrap, crash_at=7)
    resumed, ckpt, moments_then = train(tmp_path / "run", wrap)
    assert ckpt.resumed_from.step == 2
    assert resumed == {number: straight[number] for number in range(6, 12)}
    assert moments_then == moments
    assert "this resume is bitwise" in caplog.text
    assert "not exact" not in caplog.text


def test_an_optimizer_and_its_wrapper_are_one_object():
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    _, wrapped = with_fabric(model, inner)
    registry = Registry()
    registry.add("optimizer", wrapped)
    assert registry.tracks(inner)
    assert registry.tracks(wrapped)
    assert registry.optimizers[0].optimizer is inner
