"""Gradients of an open window: present, absent, zero or sparse, each as it was."""

from __future__ import annotations

import pytest
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


def test_gradients_that_are_views_of_one_buffer_stay_in_it():
    model, other = pair(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model(torch.randn(3, 4)).square().sum().backward()
    flat = torch.ones(sum(p.numel() for p in other.parameters()))
    for p, part in zip(other.parameters(), flat.split([16, 4, 8, 2]), strict=True):
        p.grad = part.view_as(p)
    model[1].bias.grad = None
    move(registry(model=model), registry(model=other))
    want = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert bits(flat[:28]) == bits(torch.cat(want))
    assert other[1].bias.grad is None
    assert [p.grad.data_ptr() for p in other.parameters() if p.grad is not None] == [
        flat[at:].data_ptr() for at in (0, 16, 20)
    ]


@pytest.mark.parametrize(
    "live",
    [
        torch.zeros(1).expand(2, 2),
        torch.zeros(2, 2).t(),
        torch.zeros(2, 2, requires_grad=True),
        torch.zeros(2, 2).to_sparse(),
        torch.inference_mode()(torch.zeros)(2, 2),
    ],
    ids=["expanded", "of another order", "with a graph", "sparse", "of inference"],
)
def test_a_gradient_that_is_not_like_the_saved_one_is_replaced(live):
    model, other = pair(lambda: nn.Linear(2, 2))
    model.weight.grad = torch.randn(2, 2)
    other.weight.grad = live
    move(registry(model=model), registry(model=other))
    assert bits(other.weight.grad) == bits(model.weight.grad)
    assert other.weight.grad is not live
    assert not other.weight.grad.requires_grad
