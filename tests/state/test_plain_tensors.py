"""Tensors in plain attributes of modules come back, or are named where they are too large."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.state.helpers import bits, frozen, move, registry, saved_of
from trainckpt.state import apply, attributes, plain_tensors
from trainckpt.state.attributes import Attributes
from trainckpt.state.plain_tensors import MAX_BYTES, PART


class Net(nn.Module):
    """A module with whatever attributes a test gives it."""

    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        vars(self).update(attributes)


def tracked(**attributes):
    """A model with these attributes, and its registry as a run begins."""
    model = Net(**attributes)
    found = registry(model=model)
    saved_of(found)
    return model, found


def resumed(source, **attributes):
    """A model as the script makes it anew, with the state of `source`."""
    model, found = tracked(**attributes)
    saved = move(source, found)
    return model, found, saved


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([1 + 2j]),
        torch.zeros(0, 4),
        (torch.ones(2), torch.zeros(2)),
        [torch.ones(2), None, 3.5, (torch.ones(1), "text")],
        {"a": torch.ones(2), 3: [torch.ones(1)]},
        deque([torch.ones(2)], maxlen=3),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("begun", [None, "missing", torch.zeros(5), []])
def test_a_value_comes_back_whatever_the_script_began_with(value, begun):
    given = {} if isinstance(begun, str) else {"h": begun}
    model, source = tracked(**given)
    model.h = value
    other, _, _ = resumed(source, **given)
    assert type(other.h) is type(value)
    assert frozen(other.h) == frozen(value)


def test_tensors_on_parameters_come_back():
    """Such as the importance of each weight."""
    model, source = tracked()
    model.layer.weight.fisher, model.layer.weight.n = torch.arange(4.0).view(2, 2), 3
    other, _, _ = resumed(source)
    assert torch.equal(other.layer.weight.fisher, torch.arange(4.0).view(2, 2))
    assert not vars(other.layer.bias)
    assert not hasattr(other.layer.weight, "n")


class Pair(NamedTuple):
    h: Any
    c: Any


@pytest.mark.parametrize("begun", [None, Pair(torch.zeros(1), None)], ids=["none", "one"])
def test_a_named_tuple_comes_back(begun):
    model, source = tracked(h=begun)
    model.h = Pair(torch.ones(2), 3)
    other, found, saved = resumed(source, h=begun)
    assert type(other.h) is Pair
    assert frozen(tuple(other.h)) == frozen((torch.ones(2), 3))
    assert found.plain_tensors.differing(saved) == []


def test_a_named_tuple_of_an_unknown_class_is_named():
    class Hidden(NamedTuple):
        h: Any

    model, source = tracked(h=None)
    model.h = Hidden(torch.ones(2))
    other, found, saved = resumed(source, h=None)
    assert other.h is None
    assert found.plain_tensors.differing(saved) == ["model.h"]


def test_an_array_comes_back():
    model, source = tracked(h=np.zeros(3))
    model.h += 2
    other, _, _ = resumed(source, h=np.zeros(3))
    assert other.h.tolist() == [2, 2, 2]


def test_a_state_with_a_graph_comes_back_without_it():
    model, source = tracked(h=torch.zeros(1, 2))
    model.h = model.layer(torch.ones(1, 2))
    other, _, _ = resumed(source, h=torch.zeros(1, 2))
    assert bits(other.h) == bits(model.h.detach())
    assert not other.h.requires_grad


def test_a_tensor_that_is_trained_is_trained_again():
    model, source = tracked(h=None)
    model.h = torch.ones(2, requires_grad=True)
    other, _, _ = resumed(source, h=None)
    assert other.h.requires_grad


def test_what_is_held_since_the_start_is_filled_and_a_constant_is_not():
    zeros = torch.zeros(2)
    model, source = tracked(kept=torch.zeros(2), bound=zeros, table={"a": torch.zeros(1)})
    model.kept += 1
    model.bound = torch.ones(2)
    model.table["a"] = torch.ones(1)
    kept, constant, table = torch.zeros(2), torch.zeros(2), {"a": torch.zeros(1)}
    other, _, _ = resumed(source, kept=kept, bound=constant, table=table)
    assert other.kept is kept
    assert other.table is table
    assert (kept.sum(), constant.sum(), table["a"].sum(), other.bound.sum()) == (2, 0, 1, 2)


def test_one_tensor_of_two_modules_is_stored_once_and_shared_again():
    shared = torch.arange(4.0)
    parts = [Net(h=shared), Net(h=shared)]
    source = registry(model=nn.Sequential(*parts))
    saved_of(source)
    for part in parts:
        part.h = parts[0].h if part is parts[1] else shared + 1
    anew = [Net(h=torch.zeros(4)), Net(h=torch.ones(4))]
    target = registry(model=nn.Sequential(*anew))
    saved_of(target)
    saved = move(source, target)
    assert [name for name in saved.tensors if name.startswith(PART)] == [f"{PART}/model.0.h"]
    assert anew[0].h is anew[1].h
    assert anew[0].h.tolist() == [1, 2, 3, 4]


def test_views_of_parameters_tracked_ones_and_other_values_are_left_out():
    model = Net(h=torch.zeros(2), seen=[1, 2], other=[torch.ones(1), object()])
    vars(model)["row"] = model.layer.weight.detach()[0]
    source = registry(model=model, counts=Attributes(model, "h"))
    assert PART not in saved_of(source).values


def test_what_is_set_between_the_resume_and_the_first_batch_is_undone():
    model, source = tracked(h=torch.zeros(2))
    model.h = torch.ones(2)
    other, found, saved = resumed(source, h=torch.zeros(2))
    other.h = torch.zeros(2)
    apply.apply(found, saved, again=True)
    assert other.h.tolist() == [1, 1]


def test_the_smallest_are_stored_and_a_larger_one_is_named_where_it_differs():
    large = torch.zeros(MAX_BYTES // 4)
    model, source = tracked(large=large.clone(), small=torch.zeros(2))
    model.large += 1
    model.small += 1
    other, found, saved = resumed(source, large=large.clone(), small=torch.zeros(2))
    assert other.small.tolist() == [1, 1]
    assert found.plain_tensors.differing(saved) == ["model.large"]
    for same in (large + 1, None):  # a forward may make it again
        other.large = same
        assert found.plain_tensors.differing(saved) == []


def test_a_container_with_many_items_is_named_where_its_length_differs():
    model, source = tracked(rows=[])
    model.rows += [torch.ones(1)] * 1000
    other, found, saved = resumed(source, rows=[])
    assert found.plain_tensors.differing(saved) == ["model.rows (1000 items then, 0 now)"]
    other.rows = model.rows
    assert found.plain_tensors.differing(saved) == []


def test_a_snapshot_without_plain_tensors_changes_none():
    _, source = tracked()
    other, _, _ = resumed(source, h=torch.ones(2))
    assert other.h.tolist() == [1, 1]


class Lookahead(torch.optim.Optimizer):
    """It keeps slow weights and a counter outside its state, around another optimizer."""

    def __init__(self, base):
        self.base, self.count = base, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, {}
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self):
        self.base.step()
        self.count += 1
        for group, rows in zip(self.param_groups, self.slow, strict=True):
            for p, row in zip(group["params"], rows, strict=True):
                row.lerp_(p.detach(), 0.5)


def test_those_of_an_optimizer_come_back_and_its_numbers_are_named():
    def made():
        model = Net()
        return registry(model=model, opt=Lookahead(torch.optim.SGD(model.parameters(), 0.1)))

    source, target = made(), made()
    saved_of(source)
    saved_of(target)
    optimizer, other = (each.optimizers[0].optimizer for each in (source, target))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = move(source, target)
    assert frozen(other.slow) == frozen(optimizer.slow)
    assert attributes.not_restored(target.watched, saved) == ["opt.count (1, now 0)"]


def test_samples_are_of_the_whole_tensor():
    one = torch.zeros(1 << 16)
    other = one.clone()
    other[-1] = 1
    assert plain_tensors.sample([one]) != plain_tensors.sample([other])
