"""Buffers that a forward makes or enlarges: masks, rotary caches, statistics of the first batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.end_to_end import making
from tests.end_to_end.making import Scale
from tests.end_to_end.training import Parts, attempt, crashed
from tests.ranks.processes import preload, run_in_turn
from tests.state.helpers import bits, move, registry, saved_of
from trainckpt.errors import StateMismatch
from trainckpt.state import apply

preload("tests.end_to_end.making")


class Making(Parts):
    def __init__(self, first=None, registers=True):
        super().__init__()
        self.model = nn.Sequential(Scale(first, registers), *self.model)

    def state(self):
        return super().state(), self.model[0].drawn.tolist()


@pytest.mark.parametrize("first", [None, torch.zeros(1)])
def test_the_resumed_run_is_the_run_that_was_never_stopped(tmp_path, first):
    straight, resumed = {}, {}
    parts, _ = attempt(tmp_path / "straight", seen=straight, parts=Making(first))
    crashed(tmp_path / "run", 7, seen=resumed, parts=Making(first))
    again, ckpt = attempt(tmp_path / "run", seen=resumed, parts=Making(first))
    assert ckpt.resumed_from.step == 2
    assert again.state() == parts.state()
    assert all(line == straight[number][0] for number in resumed for line in resumed[number])


def test_each_rank_of_a_ddp_run_has_its_own_back(tmp_path):
    straight, _, resumed = run_in_turn(
        2,
        (making.train, str(tmp_path / "straight"), 4),
        (making.train, str(tmp_path / "run"), 3),
        (making.train, str(tmp_path / "run"), 4),
    )
    for (losses, _), (rest, at) in zip(straight, resumed, strict=True):
        assert at == 3
        assert rest == {3: losses[3]}


def test_one_that_is_registered_nowhere_is_refused_and_the_way_out_is_said(tmp_path):
    crashed(tmp_path, 7, parts=Making(registers=False))
    with pytest.raises(StateMismatch) as caught:
        attempt(tmp_path, parts=Making(registers=False))
    (difference,) = caught.value.differences
    assert difference.startswith("model/0.drawn is gone: only the snapshot has it; if a forward")


def test_it_can_be_excluded_while_it_is_none_and_is_made_again_then(tmp_path):
    crashed(tmp_path, 7, parts=Making(), exclude="*.drawn")
    parts, ckpt = attempt(tmp_path, parts=Making(), exclude="*.drawn")
    assert ckpt.resumed_from.step == 2
    assert parts.model[0].drawn is not None


def test_a_forward_before_the_first_batch_leaves_nothing_behind():
    """State is put back on resuming, and once more at the first boundary."""
    source = nn.Sequential(Scale(), Scale(torch.zeros(1, dtype=torch.float64)))
    target = nn.Sequential(Scale(), Scale(torch.zeros(1, dtype=torch.float64)))
    source[1](torch.ones(2, 1))
    live, saved = registry(model=target), saved_of(registry(model=source))
    apply.check(live, saved, "s0~1.1")
    apply.apply(live, saved)
    target(torch.ones(5, 1))
    assert len(target[0].drawn) == len(target[1].drawn) == 5
    apply.apply(live, saved, again=True)
    assert target[0].drawn is None
    assert bits(target[1].drawn) == bits(source[1].drawn)


def test_what_is_one_buffer_of_two_modules_is_one_again():
    def both():
        return nn.ModuleDict({"a": Scale(), "b": Scale(), "c": Scale()})

    source, target = both(), both()
    source.a(torch.ones(3, 1))
    source.b.drawn = source.a.drawn
    move(registry(model=source), registry(model=target))
    assert bits(target.a.drawn) == bits(source.a.drawn)
    assert target.b.drawn is target.a.drawn
    assert target.c.drawn is None
