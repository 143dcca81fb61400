"""Optimizers that step by another one: what they lose is said, and what to do holds."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from tests.end_to_end import local_sgd
from tests.ranks.processes import preload, run_in_turn, run_ranks
from trainckpt import Checkpointer
from trainckpt.state.adapters.optimizer import OptimizerState
from trainckpt.state.registry import Registry

preload("tests.end_to_end.local_sgd")


class Sharp(torch.optim.Optimizer):
    """As SAM's: another optimizer inside, on the same groups."""

    def __init__(self, params, base, **options):
        super().__init__(params, options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


class Ahead(torch.optim.Optimizer):
    """As timm's Lookahead, which leaves out Optimizer.__init__ on purpose."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base, self.defaults, self.num_steps = base, base.defaults, 0
        self.param_groups, self.state = base.param_groups, defaultdict(dict)

    def step(self, closure=None):
        self.num_steps += 1
        return self._base.step(closure)

    def zero_grad(self, set_to_none=True):
        self._base.zero_grad(set_to_none)

    def state_dict(self):
        return {**self._base.state_dict(), "num_steps": self.num_steps}


class Shown(torch.optim.Optimizer):
    """A wrapper that shows the state of what it wraps as its own."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.parts, self.state = {"base": base}, base.state


def sharp(model):
    return Sharp(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def ahead(model):
    return Ahead(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def train(place, make, until, tracked=lambda optimizer: optimizer, **options):
    """Steps up to `until`; the losses by step, and the Checkpointer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = make(model)
    losses = {}
    options = {"every": "2 steps", **options}
    with Checkpointer(place, model=model, optimizer=tracked(optimizer), **options) as ckpt:
        for number in range(ckpt.cursor.micro_batches, until):
            ckpt.boundary()
            loss = model(torch.ones(2, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[number] = loss.item().hex()
    return losses, ckpt


def problems(optimizer, *tracked):
    return OptimizerState("optimizer", optimizer).problems(lambda one: one in tracked)


def test_a_state_dict_of_its_own_is_named():
    optimizer = ahead(nn.Linear(3, 1))
    found = problems(optimizer, optimizer._base)
    assert [f.split(";")[0] for f in found] == ["optimizer (a Ahead) has a state_dict of its own"]


def test_it_is_named_under_a_wrapper_that_shows_its_state_too():
    optimizer = Shown(ahead(nn.Linear(3, 1)))
    found = [f.split(";")[0] for f in problems(optimizer, optimizer.parts["base"]._base)]
    assert found == ["optimizer.parts['base'] (a Ahead) has a state_dict of its own"]
    assert problems(optimizer, optimizer.parts["base"]) == []


def test_a_wrapper_of_torch_that_keeps_more_is_named_as_any_other():
    """torch.optim alone promises that its state_dict holds groups and state."""
    kind = type("Named", (Ahead,), {"__module__": "torch.distributed.optim.named_optimizer"})
    kind.state_dict = lambda self: {"more": 1}
    kind.state_dict.__module__ = kind.__module__
    optimizer = kind(torch.optim.SGD(nn.Linear(3, 1).parameters(), 0.1))
    (found,) = problems(optimizer, optimizer._base)
    assert found.startswith("optimizer (a Named) has a state_dict of its own")


@pytest.mark.parametrize("inner_too", [False, True])
def test_ranks_that_average_their_weights_now_and_then_go_on_averaging_in_time(tmp_path, inner_too):
    program = local_sgd.train
    straight, _, resumed = run_in_turn(
        2,
        (program, str(tmp_path / "straight"), 11, inner_too),
        (program, str(tmp_path / "run"), 6, inner_too),
        (program, str(tmp_path / "run"), 11, inner_too),
    )
    for (whole, _), (rest, named) in zip(straight, resumed, strict=True):
        assert rest == {number: whole[number] for number in range(6, 11)}
        assert [problem for problem in named if "state_dict" in problem] == []


def test_a_snapshot_of_an_older_release_without_that_number_is_said_to_lack_it():
    (rank,) = run_ranks(local_sgd.lost, 1)
    assert rank == [
        ["the step of optimizer's averager begins anew: the snapshot does not hold it"],
        [],
    ]


def test_what_is_all_there_has_no_problems():
    base = torch.optim.Adam(nn.Linear(3, 1).parameters())
    assert problems(base) == problems(Shown(base)) == []
    assert problems(torch.optim.LBFGS(nn.Linear(3, 1).parameters())) == []


def both(optimizer):
    return [optimizer, optimizer.base_optimizer]


@pytest.mark.parametrize("both", [both, lambda one: one])
def test_an_optimizer_inside_resumes_exactly_whether_it_is_named_or_not(tmp_path, both):
    straight, _ = train(tmp_path / "straight", sharp, 8, both)
    train(tmp_path / "run", sharp, 5, both)
    resumed, ckpt = train(tmp_path / "run", sharp, 8, both)
    assert ckpt.resumed_from.step == 5
    assert resumed == {number: straight[number] for number in (5, 6, 7)}


def unhooked(base):
    """An optimizer that leaves Optimizer.__init__ out, and steps by itself."""

    class Unhooked(torch.optim.Optimizer):
        def __init__(self):
            self._optimizer_step_pre_hooks = OrderedDict()
            self._optimizer_step_post_hooks = OrderedDict()
            self.defaults, self.param_groups, self.state = {}, base.param_groups, defaultdict(dict)

        def step(self, closure=None):
            pass

    return Unhooked()


@pytest.mark.parametrize(
    ("make", "options", "counted"),
    [
        (Ahead, {}, 5),
        (unhooked, {"accumulate": 1}, 5),
        (unhooked, {}, 0),
    ],
)
def test_steps_that_cannot_be_counted_are_said_at_the_start(
    tmp_path, caplog, make, options, counted
):
    def made(model):
        return make(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))

    _, ckpt = train(tmp_path, made, 5, **options)
    assert ckpt.cursor.step == counted
    said = "steps are not counted, so nothing is saved by their number: optimizer (a Unhooked)"
    assert (said in caplog.text) == (not counted)


def test_a_snapshot_of_an_older_release_without_the_optimizer_inside_is_said_to_lack_it(
    tmp_path, monkeypatch, caplog
):
    with monkeypatch.context() as older:
        older.setattr(Registry, "add_implied", lambda self: None)
        train(tmp_path, sharp, 5)
    caplog.set_level("INFO", "trainckpt")
    _, ckpt = train(tmp_path, sharp, 8)
    assert ckpt.resumed_from.step == 5
    assert (
        "not bitwise: the state of optimizer.base_optimizer is not in the snapshot" in caplog.text
    )
