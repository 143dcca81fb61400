"""What DDP keeps to itself, seen from one rank; its effect on three: tests/test_campaign.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.state.helpers import frozen, move, registry
from trainckpt.state import apply
from trainckpt.state.adapters import ddp
from trainckpt.state.adapters.model import ModelState


@pytest.fixture(autouse=True)
def group():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def wrapped():
    return DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def train(model):
    model(torch.ones(1, 3)).sum().backward()


def test_before_the_first_backward_there_is_no_bucket_order():
    model = wrapped()

    assert ddp.capture(model, "")["bucket_order"] == ""


def test_the_order_is_known_right_after_the_first_synchronized_backward():
    # The next forward would regroup the buckets; a snapshot may lie before it.
    model, twin = wrapped(), wrapped()
    train(model)
    train(twin)
    twin(torch.ones(1, 3))

    assert ddp.capture(model, "")["bucket_order"] == ddp.capture(twin, "")["bucket_order"] != ""


def test_a_fresh_model_takes_over_the_order():
    model, fresh = wrapped(), wrapped()
    train(model)
    saved = ddp.capture(model, "")
    saved["bucket_order"] = ",".join(saved["bucket_order"].split()[::-1])

    ddp.apply_bucket_order(fresh, saved)

    assert ddp.capture(fresh, "")["bucket_order"].split() == saved["bucket_order"].split(",")


def test_the_order_is_replayed_only_where_sums_depend_on_it():
    # One rank adds nothing; from three ranks on: tests/test_campaign.py.
    assert not ddp.rounds_by_buckets(wrapped())
    assert not ddp.rounds_by_buckets(nn.Linear(1, 1))
    hooked = wrapped()
    hooked.register_comm_hook(None, allreduce_hook)  # some sum by bucket: PowerSGD

    assert ddp.rounds_by_buckets(hooked)


@pytest.mark.parametrize("hooked", [False, True])
def test_an_order_under_a_hook_is_replayed_before_the_hook_is_there_again(hooked):
    # A script may register it after the resume: then its first buckets have to be the same ones.
    model, fresh = wrapped(), wrapped()
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    train(model)
    hidden = ddp.capture(model, "")
    registry = SimpleNamespace(
        models=[SimpleNamespace(name="model", reducing=fresh)], bucket_orders={}, as_saved=set()
    )

    apply._bucket_order(registry, SimpleNamespace(values={apply.DDP: {"model": hidden}}))

    assert fresh._has_rebuilt_buckets == hooked
    assert registry.bucket_orders == {fresh: hidden["bucket_order"]}


def test_parameters_are_walked_through_once_for_each_reducer(monkeypatch):
    # It is part of what a save makes training wait for. A hook that comes later is seen.
    model, walks, parameters = wrapped(), [], DistributedDataParallel.parameters

    def walked(module, *given):
        walks.append(module)
        return parameters(module, *given)

    train(model)
    monkeypatch.setattr(DistributedDataParallel, "parameters", walked)
    assert [ddp.capture(model, "0")["own_way"] for _ in range(3)] == [False] * 3
    assert walks == [model]
    ddp.let_go_of_buckets(model)()
    assert not ddp.capture(model, "0")["own_way"]
    model.register_comm_hook(None, allreduce_hook)
    assert ddp.capture(model, "0")["own_way"]


def test_of_several_inside_one_module_it_is_said_that_nothing_is_kept():
    both = nn.ModuleDict({"g": wrapped(), "d": wrapped()})
    (problem,) = ModelState("gan", both).problems()
    assert problem.startswith(
        "gan holds several DDP modules (g, d), and what each keeps to itself is"
    )
    assert problem.endswith("track each by itself")
    assert ModelState("g", nn.Sequential(both["g"])).problems() == []


def test_what_is_not_wrapped_has_nothing_hidden():
    assert ddp.capture(nn.Linear(1, 1), "") is None


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained before"])
def test_gradients_of_an_open_window_go_on_whether_they_are_views_of_buckets_or_not(
    as_view, trained
):
    def build(seed):
        torch.manual_seed(seed)
        return DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=as_view)

    model, other = build(0), build(1)
    train(model)
    if trained:
        train(other)
    move(registry(model=model), registry(model=other))
    for one in (model, other):
        with one.no_sync():
            train(one)
        train(one)
    assert frozen([p.grad for p in other.parameters()]) == frozen(
        [p.grad for p in model.parameters()]
    )
