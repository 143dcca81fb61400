"""Gradients of an open window: present, absent, zero or sparse, each as it was."""

from __future__ import annotations

import torch
from torch import nn

from tests.state.helpers import bits, move, registry


def pair(build):
    torch.manual_seed(0)
    return build(), build()


def test_none_and_zero_are_two_things():
    model, other = pair(lambda: nn.Linear(2, 2))
    model.weight.grad = torch.zeros(2, 2)
    other.bias.grad = torch.ones(2)
    move(registry(model=model), registry(model=other))
    assert torch.equal(other.weight.grad, torch.zeros(2, 2))
    assert other.bias.grad is None


def test_sparse_gradients_come_back_uncoalesced_as_they_were():
    model, other = pair(lambda: nn.Embedding(9, 3, sparse=True))
    for words in ([1, 1, 2], [2, 5]):
        model(torch.tensor(words)).square().sum().backward()
    move(registry(model=model), registry(model=other))
    assert bits(other.weight.grad) == bits(model.weight.grad)
    assert other.weight.grad.is_sparse


def test_sparse_optimizers_go_on_alike():
    model, other = pair(lambda: nn.Embedding(9, 3, sparse=True))
    one, two = (torch.optim.SparseAdam(m.parameters(), 0.1) for m in (model, other))
    model(torch.tensor([1, 2])).square().sum().backward()
    one.step()
    move(registry(model=model, o=one), registry(model=other, o=two))
    for m, o in ((model, one), (other, two)):
        o.zero_grad()
        m(torch.tensor([2, 3])).square().sum().backward()
        o.step()
    assert bits(other.weight.detach()) == bits(model.weight.detach())


def test_a_gradient_keeps_its_memory_order_and_is_not_bound_to_the_snapshot():
    model, other = pair(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    saved = move(registry(model=model), registry(model=other))
    assert bits(other.weight.grad) == bits(model.weight.grad)
    other.weight.grad.zero_()
    assert saved.tensors["gradients/model/weight"].count_nonzero()


def test_gradients_of_frozen_and_complex_parameters_come_back():
    model, other = pair(lambda: nn.Linear(2, 2, dtype=torch.complex128))
    model.weight.requires_grad_(False)
    model.weight.grad = torch.randn(2, 2, dtype=torch.complex128)
    move(registry(model=model), registry(model=other))
    assert bits(other.weight.grad) == bits(model.weight.grad)
