"""Tensor subclasses come back as they were: their class, and every bit of their inner tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.state.helpers import bits, move, registry, saved_of
from trainckpt.errors import StateMismatch, UnusableSnapshot
from trainckpt.state import apply
from trainckpt.state.capture import capture
from trainckpt.state.values import UnknownValue


class Quantised(torch.Tensor):
    """As a low-bit optimizer's state: codes and a scale, and a type that it only pretends."""

    @staticmethod
    def __new__(cls, codes, scale, signed):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, signed):
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["codes"], tensors["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].signed)
        raise NotImplementedError(func)  # every cast among them

    def values(self):
        return self.codes.float() * self.scale


class LowBit(torch.optim.Optimizer):
    """Momentum in 8 bits, made at the first step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].get("momentum")
            value = p.grad if kept is None else 0.9 * kept.values() + p.grad
            scale = value.abs().max().reshape(1) / 127
            codes = (value / scale).round().to(torch.int8)
            self.state[p]["momentum"] = Quantised(codes, scale, True)
            p.sub_(0.1 * self.state[p]["momentum"].values())


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def quantised(signed=True):
    return Quantised(torch.randint(-9, 9, (3, 2), dtype=torch.int8), torch.rand(1), signed)


def same(one, other):
    assert type(one) is type(other) is Quantised
    assert bits(one.codes) == bits(other.codes)
    assert bits(one.scale) == bits(other.scale)
    assert one.signed == other.signed


def stepped(steps, model=None, optimizer=None):
    torch.manual_seed(0)
    model = model or nn.Linear(3, 1, dtype=torch.bfloat16)
    optimizer = optimizer or LowBit(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 3, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_an_optimizer_with_low_bit_states_goes_on_exactly():
    straight, _ = stepped(6)
    cold, _ = stepped(3)
    model, optimizer = stepped(3)
    other = nn.Linear(3, 1, dtype=torch.bfloat16)
    fresh = LowBit(other.parameters())
    move(registry(model=model, optimizer=optimizer), registry(model=other, optimizer=fresh))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        same(optimizer.state[mine]["momentum"], fresh.state[theirs]["momentum"])
    stepped(3, other, fresh)
    assert bits(other.weight.detach()) == bits(straight.weight.detach())
    assert bits(other.weight.detach()) != bits(cold.weight.detach())


def test_an_object_of_the_scripts_own_gets_it_back():
    mine, theirs = Holder([{"deep": quantised()}]), Holder(None)
    move(registry(mine=mine), registry(mine=theirs))
    same(mine.value[0]["deep"], theirs.value[0]["deep"])


def module(signed):
    made = nn.Module()
    made.register_buffer("b", quantised(signed))
    return made


def test_a_module_whose_subclass_has_another_context_is_refused():
    move(registry(model=module(True)), registry(model=module(True)))
    with pytest.raises(StateMismatch, match=r"model/b was .*True.*, is .*False"):
        move(registry(model=module(True)), registry(model=module(False)))


def test_a_class_that_nothing_has_defined_is_refused_by_name():
    saved = saved_of(registry(mine=Holder(quantised())))
    node = dict(
        saved.values["mine"]["of"] if "of" in saved.values["mine"] else saved.values["mine"]
    )
    node["value"]["subclass"] = ["gone", "Quantised"]
    with pytest.raises(UnusableSnapshot, match=r"class \['gone', 'Quantised'\]"):
        apply.apply(registry(mine=Holder(None)), saved)


def test_a_context_with_a_tensor_in_it_is_refused_by_name():
    class Hiding(Quantised):
        def __tensor_flatten__(self):
            return ["codes", "scale"], self.codes

    with pytest.raises(UnknownValue, match=r"mine.value#context holds a tensor"):
        capture(registry(mine=Holder(Hiding(torch.zeros(1), torch.zeros(1), True))))
