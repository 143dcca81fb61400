"""What is particular about the state of an optimizer: types, identity, groups, refusals.

That each optimizer of torch resumes exactly: test_optimizer_table.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.state.helpers import frozen, move, registry, saved_of
from tests.state.optimizer_programs import Net, state_of, step
from trainckpt.errors import StateMismatch
from trainckpt.state import apply
from trainckpt.state.capture import capture
from trainckpt.state.values import UnknownValue

O = torch.optim  # noqa: E741


def adam(parameters):
    return O.Adam(parameters, 0.01)


def adam_of_a_tensor(parameters):
    return O.Adam(parameters, torch.tensor(0.01))


def sgd(parameters):
    return O.SGD(parameters, 0.1)


def build(make, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Net(dtype)
    return model, make(list(model.parameters()))


def test_fp32_moments_of_bf16_parameters_keep_every_bit():
    model, optimizer = build(adam, torch.bfloat16)
    step(model, optimizer, 0)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].float() + 1e-7
    other, resumed = build(adam, torch.bfloat16, seed=1)
    move(registry(model=model, optimizer=optimizer), registry(model=other, optimizer=resumed))
    assert state_of(other, resumed) == state_of(model, optimizer)
    assert resumed.state[other.head.weight]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("between", ["nothing", "a step", "another tensor", "state lost"])
def test_state_is_applied_again_whatever_the_script_did_since_in_the_same_memory_if_it_can(between):
    model, optimizer = build(adam)
    step(model, optimizer, 0)
    source = registry(model=model, optimizer=optimizer)
    other, resumed = build(adam, seed=1)
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
    model, optimizer = build(adam_of_a_tensor)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    other, resumed = build(adam_of_a_tensor, seed=1)
    held = resumed.param_groups[0]["lr"]
    move(registry(model=model, optimizer=optimizer), registry(model=other, optimizer=resumed))
    assert held is resumed.param_groups[0]["lr"]
    assert held.item() == 0.5


def test_groups_of_their_own_options_come_back():
    def make(lr):
        model = Net()
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
    model, one = build(adam)
    other = sgd(model.parameters())
    (line,) = refusal(registry(model=model, o=one), registry(model=model, o=other))
    assert "Adam" in line
    assert "SGD" in line


def test_other_groups_are_refused_by_the_names_of_their_parameters():
    model, one = build(sgd)
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
