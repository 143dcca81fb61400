"""Every optimizer of torch comes back bit for bit, and trains on as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.state.helpers import frozen, move, registry, saved_of
from trainckpt.errors import StateMismatch
from trainckpt.state import apply
from trainckpt.state.capture import capture
from trainckpt.state.values import UnknownValue

O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "SGD": lambda p: O.SGD(p, 0.1),
    "SGD momentum": lambda p: O.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: O.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: O.Adam(p, 0.01),
    "Adam amsgrad": lambda p: O.Adam(p, 0.01, amsgrad=True),
    "Adam foreach": lambda p: O.Adam(p, 0.01, foreach=True),
    "Adam fused": lambda p: O.Adam(p, 0.01, fused=True),
    "Adam tensor lr": lambda p: O.Adam(p, torch.tensor(0.01)),
    "Adam capturable betas": lambda p: O.Adam(p, 0.01, betas=(0.8, 0.99), maximize=True),
    "AdamW": lambda p: O.AdamW(p, 0.01, weight_decay=0.1),
    "AdamW fused": lambda p: O.AdamW(p, 0.01, fused=True),
    "Adagrad": lambda p: O.Adagrad(p, 0.1, lr_decay=0.01),
    "Adagrad fused": lambda p: O.Adagrad(p, 0.1, fused=True),
    "Adadelta": lambda p: O.Adadelta(p, 0.5),
    "Adamax": lambda p: O.Adamax(p, 0.01),
    "ASGD": lambda p: O.ASGD(p, 0.01),
    "RMSprop": lambda p: O.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: O.Rprop(p, 0.01),
    "NAdam": lambda p: O.NAdam(p, 0.01),
    "RAdam": lambda p: O.RAdam(p, 0.01),
    "Adafactor": lambda p: O.Adafactor(p, 0.01),
    "LBFGS": lambda p: O.LBFGS(p, 0.1, max_iter=3, history_size=2, line_search_fn="strong_wolfe"),
}
if hasattr(O, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: O.Muon([q for q in p if q.dim() == 2], 0.01)


class Net(nn.Module):
    """A convolution, and a linear layer."""

    def __init__(self, dtype, memory_format):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        self.head = nn.Linear(4, 2)
        self.to(dtype)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))


def build(make, dtype=torch.float32, seed=0, memory_format=torch.contiguous_format):
    torch.manual_seed(seed)
    model = Net(dtype, memory_format)
    return model, make(list(model.parameters()))


def step(model, optimizer, number):
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(number))

    def closure():
        optimizer.zero_grad()
        loss = model(x.to(model.head.weight.dtype)).float().square().sum()
        loss.backward()
        return loss

    if isinstance(optimizer, O.LBFGS):
        return optimizer.step(closure).item().hex()
    loss = closure()
    optimizer.step()
    return loss.item().hex()


def state_of(model, optimizer):
    named = {id(p): name for name, p in model.named_parameters()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = {named[id(p)]: s for p, s in optimizer.state.items()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    return frozen([dict(model.state_dict()), groups, state, grads])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_comes_back_bit_for_bit_and_goes_on_alike(name):
    goes_on_alike(name)


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "AdamW fused", "NAdam", "Adafactor"])
def test_it_does_on_bf16_parameters_too(name):
    goes_on_alike(name, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "LBFGS"])
def test_it_does_in_a_channels_last_model_too(name):
    """Fused kernels walk moments and gradients as they lie in memory."""
    goes_on_alike(name, memory_format=torch.channels_last)


def goes_on_alike(name, **how):
    model, optimizer = build(OPTIMIZERS[name], **how)
    for number in range(3):
        step(model, optimizer, number)
    other, resumed = build(OPTIMIZERS[name], seed=1, **how)
    move(registry(model=model, optimizer=optimizer), registry(model=other, optimizer=resumed))
    assert state_of(other, resumed) == state_of(model, optimizer)
    losses = [step(model, optimizer, n) for n in range(3, 6)]
    assert [step(other, resumed, n) for n in range(3, 6)] == losses
    assert state_of(other, resumed) == state_of(model, optimizer)


def test_fp32_moments_of_bf16_parameters_keep_every_bit():
    model, optimizer = build(OPTIMIZERS["Adam"], torch.bfloat16)
    step(model, optimizer, 0)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].float() + 1e-7
    other, resumed = build(OPTIMIZERS["Adam"], torch.bfloat16, seed=1)
    move(registry(model=model, optimizer=optimizer), registry(model=other, optimizer=resumed))
    assert state_of(other, resumed) == state_of(model, optimizer)
    assert resumed.state[other.head.weight]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("between", ["nothing", "a step", "another tensor", "state lost"])
def test_state_is_applied_again_whatever_the_script_did_since_in_the_same_memory_if_it_can(between):
    model, optimizer = build(OPTIMIZERS["Adam"])
    step(model, optimizer, 0)
    source = registry(model=model, optimizer=optimizer)
    other, resumed = build(OPTIMIZERS["Adam"], seed=1)
    target = registry(model=other, optimizer=resumed)
    saved = move(source, target)
    moments = resumed.state[other.head.weight]
    first = moments["exp_avg"]
    if between == "a step":
        step(other, resumed, 3)
    elif between == "another tensor":
        moments["exp_avg"] = torch.ones_like(first)
    elif between == "state lost":
        resumed.state.clear()
    apply.apply(target, saved, again=True)
    assert state_of(other, resumed) == state_of(model, optimizer)
    kept = resumed.state[other.head.weight]["exp_avg"] is first
    assert kept == (between in ("nothing", "a step"))
    apply.settled(target)
    apply.apply(target, saved, again=True)
    assert resumed.state[other.head.weight]["exp_avg"] is not first


def test_a_tensor_learning_rate_stays_the_tensor_that_others_hold():
    model, optimizer = build(OPTIMIZERS["Adam tensor lr"])
    optimizer.param_groups[0]["lr"].fill_(0.5)
    other, resumed = build(OPTIMIZERS["Adam tensor lr"], seed=1)
    held = resumed.param_groups[0]["lr"]
    move(registry(model=model, optimizer=optimizer), registry(model=other, optimizer=resumed))
    assert held is resumed.param_groups[0]["lr"]
    assert held.item() == 0.5


def test_groups_of_their_own_options_come_back():
    def make(lr):
        model = Net(torch.float32, torch.contiguous_format)
        groups = [{"params": model.conv.parameters(), "lr": lr}, {"params": [model.head.weight]}]
        return model, O.SGD(groups, 0.1, momentum=0.9)

    (model, optimizer), (other, resumed) = make(0.7), make(0.3)
    optimizer.param_groups[1]["momentum"] = 0.5
    move(registry(model=model, optimizer=optimizer), registry(model=other, optimizer=resumed))
    assert [g["lr"] for g in resumed.param_groups] == [0.7, 0.1]
    assert [g["momentum"] for g in resumed.param_groups] == [0.9, 0.5]


def test_parameters_that_no_tracked_model_has_are_kept_by_the_optimizer():
    """Somebody tracks an optimizer of bare tensors: their values are state like any other."""

    def make(value):
        weight = nn.Parameter(torch.full((3,), value))
        return weight, O.SGD([weight], 0.1, momentum=0.9)

    (weight, optimizer), (other, resumed) = make(1.0), make(2.0)
    weight.sum().backward()
    optimizer.step()
    move(registry(optimizer=optimizer), registry(optimizer=resumed))
    assert torch.equal(other, weight)
    assert torch.equal(other.grad, weight.grad)
    assert frozen(resumed.state[other]) == frozen(optimizer.state[weight])


def refusal(source, target):
    with pytest.raises(StateMismatch) as caught:
        apply.check(target, saved_of(source), "s0~1.1")
    return caught.value.differences


def test_another_kind_of_optimizer_is_refused():
    """Adam's moments in an SGD would be wrong state without a word."""
    model, adam = build(OPTIMIZERS["Adam"])
    sgd = O.SGD(model.parameters(), 0.1)
    (line,) = refusal(registry(model=model, o=adam), registry(model=model, o=sgd))
    assert "Adam" in line
    assert "SGD" in line


def test_other_groups_are_refused_by_the_names_of_their_parameters():
    model, one = build(OPTIMIZERS["SGD"])
    less = O.SGD(model.conv.parameters(), 0.1)
    split = O.SGD([{"params": [p]} for p in model.parameters()], 0.1)
    (line,) = refusal(registry(model=model, o=one), registry(model=model, o=less))
    assert "model/head.bias" in line
    (line,) = refusal(registry(model=model, o=one), registry(model=model, o=split))
    assert line == "o had 1 parameter groups, has 4"


class Shared(O.Optimizer):
    """One second moment for all parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        parameters = self.param_groups[0]["params"]
        first = self.state[parameters[0]].setdefault("v", torch.zeros(()))
        for p in parameters:
            moment = self.state[p].setdefault("v", first)
            moment.mul_(0.9).add_(p.grad.square().mean())
            p.sub_(0.1 * p.grad / (moment.sqrt() + 1e-8))


def test_one_tensor_that_is_the_state_of_several_parameters_is_one_again():
    model, optimizer = build(Shared)
    step(model, optimizer, 0)
    other, again = build(Shared, seed=1)
    saved = saved_of(registry(model=model, optimizer=optimizer))
    assert sum(name.endswith("/v") for name in saved.tensors) == 1
    target = registry(model=other, optimizer=again)
    for _ in range(2):  # on resuming, and at the first boundary
        apply.apply(target, saved)
    assert len({id(state["v"]) for state in again.state.values()}) == 1
    step(model, optimizer, 1)
    step(other, again, 1)
    assert state_of(other, again) == state_of(model, optimizer)


class Bare(O.SGD):
    """Its state of a parameter is a tensor."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p] = torch.zeros(())


def test_state_that_is_no_dict_is_refused_by_name():
    model, optimizer = build(lambda p: Bare(p, 0.1))
    step(model, optimizer, 0)
    with pytest.raises(UnknownValue, match=r"keeps a Tensor as the state of model/conv\.weight"):
        capture(registry(model=model, optimizer=optimizer))
