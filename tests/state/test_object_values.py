"""Plain attributes of callbacks are restored, unless they belong to another object."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch

from trainckpt.state.attributes import Watched
from trainckpt.state.captured import Captured, Saved
from trainckpt.state.object_values import PART, ObjectValues


class Callback:
    def __init__(self, **values):
        self.kept = "as it was"
        vars(self).update(values)


def values_of(callback):
    watched = Watched([], [])
    watched.watch_callback(callback)
    found = ObjectValues(PART, watched.callbacks)
    found.begin()
    return found


def saved_by(change, **begun):
    """Return what a save has, after `change` of a callback that begins with these attributes."""
    callback = Callback(**begun)
    values, out = values_of(callback), Captured()
    change(callback)
    values.capture(out)
    return Saved({name: tensor.clone() for name, tensor in out.tensors.items()}, out.values), values


def restored(saved, **begun):
    callback = Callback(**begun)
    values_of(callback).restore(saved)
    return vars(callback)


NESTED = {"train": {"loss": [0.5, 0.25]}}
VALUES = {
    "a number": (0, 3),
    "no number at first": (None, 0.5),
    "a text": ("warm", "cold"),
    "a list": ([], [1, 2.5, None]),
    "a dict": ({}, {"a": 1}),
    "a set": (set(), {1, 2}),
    "a deque": (deque(maxlen=2), deque([1, 2], maxlen=2)),
    "a counter": (Counter(), Counter("ab")),
    "an ordered dict": (OrderedDict(), OrderedDict(b=1, a=2)),
    "a tuple": ((), (1, (2, 3))),
    "nested": (defaultdict(lambda: defaultdict(list)), NESTED),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_changed_value_is_restored(case):
    begun, value = VALUES[case]

    def change(callback):
        if case == "nested":
            callback.value["train"]["loss"] += NESTED["train"]["loss"]
        else:
            callback.value = value

    saved, values = saved_by(change, value=begun)
    assert values.names() == {"Callback.value"}
    fresh = {"nested": defaultdict(lambda: defaultdict(list))}.get(case, type(begun)())
    if case == "a deque":
        fresh = deque(maxlen=2)
    now = restored(saved, value=begun if begun is None else fresh)
    assert now["value"] == value
    assert type(now["value"]) is type(value if begun is None else begun)
    assert now["kept"] == "as it was"


def test_a_container_that_others_hold_stays_the_same_object():
    saved, _ = saved_by(lambda callback: callback.value.append(2), value=[1])
    shared = [1]
    assert restored(saved, value=shared)["value"] is shared
    assert shared == [1, 2]


def test_a_nested_container_is_made_by_the_factory_of_its_dictionary():
    saved, _ = saved_by(
        lambda callback: callback.value["a"]["b"].append(1),
        value=defaultdict(lambda: defaultdict(list)),
    )
    value = restored(saved, value=defaultdict(lambda: defaultdict(list)))["value"]
    value["a"]["c"].append(2)
    assert value == {"a": {"b": [1], "c": [2]}}


def test_a_small_tensor_is_restored_with_its_bits():
    saved, _ = saved_by(lambda callback: callback.value.add_(1 / 3), value=torch.zeros(3))
    assert torch.equal(restored(saved, value=torch.zeros(3))["value"], torch.zeros(3) + 1 / 3)


def test_a_value_that_has_not_changed_is_the_script_s():
    saved, values = saved_by(lambda callback: None, value=3)
    assert values.names() == set()
    assert restored(saved, value=5)["value"] == 5


def test_the_time_is_not_restored():
    saved, _ = saved_by(lambda callback: setattr(callback, "at", time.time()), at=0.0, value=1)
    assert restored(saved, at=0.0)["at"] == 0.0


@pytest.mark.parametrize(
    "made", [object(), torch.zeros(1 << 20), [object()], torch.zeros(2, requires_grad=True)]
)
def test_a_callback_that_made_another_object_is_left_as_it_is(made):
    def change(callback):
        callback.count, callback.made = 3, made

    saved, values = saved_by(change, count=0, made=None)
    assert values.names() == set()
    assert restored(saved, count=0, made=None)["count"] == 0


def test_an_object_made_before_the_first_boundary_is_made_again():
    saved, values = saved_by(lambda callback: setattr(callback, "count", 3), count=0, file=object())
    assert values.names() == {"Callback.count"}
    assert restored(saved, count=0, file=object())["count"] == 3


def test_a_container_in_a_dictionary_keeps_its_factory():
    def begun():
        return {"train": defaultdict(list), "other": defaultdict(set)}

    saved, _ = saved_by(lambda callback: callback.value["train"]["a"].append(1), value=begun())
    value = restored(saved, value=begun())["value"]
    value["train"]["b"].append(2)
    value["other"]["c"].add(3)
    assert value["train"]["b"] == [2]


def test_a_dictionary_that_only_holds_what_can_be_stored_is_restored_with_its_factories():
    def begun():
        return {"train": defaultdict(list)}

    saved, _ = saved_by(lambda callback: callback.value["train"]["a"].append(1), value=begun())
    value = restored(saved, value=begun())["value"]
    value["train"]["b"].append(2)
    assert value == {"train": {"a": [1], "b": [2]}}
