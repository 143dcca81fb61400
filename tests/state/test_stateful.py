"""Whatever has state_dict and load_state_dict: schedulers, scalers, the user's own objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from tests.state.helpers import frozen, move, registry, saved_of
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.state import apply
from trainckpt.state.capture import capture
from trainckpt.state.values import UnknownValue

SCHEDULERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda e: 0.9**e),
    "LambdaLR of an object": lambda o: lr.LambdaLR(o, Decay(0.5)),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 3),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "CyclicLR of a function": lambda o: lr.CyclicLR(
        o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x, cycle_momentum=False
    ),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.5, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=2), lr.CosineAnnealingLR(o, 5)], [2]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.5, 3), lr.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 3),
}


class Decay:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, epoch):
        return self.factor**epoch


def build(make):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, make(optimizer)


def rates(optimizer, scheduler, number):
    found = []
    for index in range(number):
        optimizer.step()
        plateau = isinstance(scheduler, lr.ReduceLROnPlateau)
        scheduler.step(*([1.0 + index % 2] if plateau else []))
        found.append([g["lr"] for g in optimizer.param_groups])
    return found


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_goes_on_with_the_same_rates(name):
    first, second = build(SCHEDULERS[name]), build(SCHEDULERS[name])
    rates(*first[1:], 4)
    move(registry(model=first[0], o=first[1:]), registry(model=second[0], o=second[1:]))
    assert rates(*second[1:], 6) == rates(*first[1:], 6)
    assert frozen(second[2].state_dict()) == frozen(first[2].state_dict())


class OlderSWALR(torch.optim.swa_utils.SWALR):
    """As in torch 2.6, which has a function in the state."""

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.parametrize("is_last_of_two", [False, True])
def test_the_function_in_the_state_of_an_older_swalr_is_made_by_the_script(is_last_of_two):
    def make(optimizer):
        swa = OlderSWALR(optimizer, 0.01, 3)
        assert callable(swa.state_dict()["anneal_func"])
        if not is_last_of_two:
            return swa
        return lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), swa], [2])

    first, second = build(make), build(make)
    rates(*first[1:], 4)
    move(registry(model=first[0], o=first[1:]), registry(model=second[0], o=second[1:]))
    assert rates(*second[1:], 6) == rates(*first[1:], 6)


def test_a_grad_scaler_comes_back():
    scaler, other = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", init_scale=2.0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    move(registry(scaler=scaler), registry(scaler=other))
    assert other.state_dict() == scaler.state_dict()


class Own:
    """An object of the user's."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_of_the_user_s_comes_back():
    source = Own({"n": 3, "t": torch.randn(2), "deep": [{"x": (1, None)}]})
    target = Own()
    move(registry(own=source), registry(own=target))
    assert frozen(target.state) == frozen(source.state)


def test_names_that_meet_are_still_two_tensors():
    """{1: a} and {"1": b}, or a dot in a key: one path, two places in the file."""
    one, two, three = torch.randn(2), torch.randn(2), torch.randn(2)
    source = Own(
        {
            1: one,
            "1": two,
            "a.b": two,
            "a": {"b": three},
            "x": torch.eye(2).to_sparse(),
            "x/indices": three,
        }
    )
    target = Own()
    move(registry(own=source), registry(own=target))
    assert frozen(target.state) == frozen(source.state)


def test_an_unknown_value_is_refused_with_the_path_to_it():
    with pytest.raises(UnknownValue, match=r"own\.metrics\.2 is a .*Decay"):
        capture(registry(own=Own({"metrics": [0, 1, Decay(1)]})))


def test_an_object_without_the_two_methods_is_refused():
    with pytest.raises(ConfigurationError, match="keep_lats is a int: neither an option"):
        registry(keep_lats=3)


class NeedsArguments(Own):
    def state_dict(self, epoch):
        return {}


def test_an_object_whose_state_needs_arguments_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"own: NeedsArguments\.state_dict cannot be called w"
    ):
        registry(own=NeedsArguments())


def test_an_object_registered_twice_is_refused_by_both_names():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="again and model are the same object"):
        registry(model=model, again=model)


@pytest.mark.parametrize("name", ["gradients", "rng", "ddp", "a/b"])
def test_a_name_of_ours_cannot_be_taken(name):
    with pytest.raises(ConfigurationError, match=r"taken|is reserved"):
        registry(**{name: Own({})})


def test_items_of_a_list_are_tracked_each_by_its_number():
    source, target = [Own(1), Own(2)], [Own(), Own()]
    move(registry(own=source), registry(own=target))
    assert [own.state for own in target] == [1, 2]


def test_what_is_tracked_on_one_side_only_is_named():
    saved = saved_of(registry(a=Own(1), b=Own(2)))
    with pytest.raises(StateMismatch) as caught:
        apply.check(registry(b=Own(), c=Own()), saved, "s0~1.1")
    assert caught.value.differences == (
        "c is tracked now, and not in the snapshot",
        "a is in the snapshot, and not tracked now",
    )


def test_a_name_that_means_another_kind_of_object_now_is_refused():
    model = nn.Linear(1, 1)
    kinds = {
        "own": Own({"groups": 1}),
        "model": model,
        "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1),
    }
    for then, source in kinds.items():
        for now, target in kinds.items():
            if then != now:
                with pytest.raises(StateMismatch, match=r"x was an? .*, is an? "):
                    apply.check(registry(x=target), saved_of(registry(x=source)), "s0~1.1")
