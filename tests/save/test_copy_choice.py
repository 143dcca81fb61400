"""Which copies are made beside training is decided by what was measured."""

from __future__ import annotations

import torch
from torch import nn

from tests.state.helpers import registry
from trainckpt.save.copying import (
    FIRST_RETRY,
    NONE,
    OVERLAP,
    PLAIN,
    RETRY_EVERY,
    CopyChoice,
    StateCopier,
    choose,
)
from trainckpt.state.device_copy import DeviceCopier


def test_both_kinds_are_tried_and_the_faster_one_is_taken():
    assert choose({PLAIN: [], OVERLAP: [], NONE: []}, 1) == PLAIN
    assert choose({PLAIN: [], OVERLAP: [], NONE: []}, 2) == OVERLAP
    assert choose({PLAIN: [], OVERLAP: [1.0], NONE: []}, 3) == PLAIN
    assert choose({PLAIN: [2.0, 2.0], OVERLAP: [1.0, 9.0, 1.0]}, 7) == OVERLAP
    assert choose({PLAIN: [1.0, 1.0], OVERLAP: [2.0, 0.1, 2.0]}, 7) == PLAIN


def test_the_other_kind_is_looked_at_again_now_and_then():
    for number in (FIRST_RETRY, RETRY_EVERY, 2 * RETRY_EVERY):
        assert choose({PLAIN: [1.0, 1.0], OVERLAP: [2.0, 2.0]}, number) == OVERLAP
        assert choose({PLAIN: [2.0, 2.0], OVERLAP: [1.0, 1.0]}, number) == PLAIN
    assert choose({PLAIN: [1.0, 1.0], OVERLAP: [2.0, 2.0]}, 2 * FIRST_RETRY) == PLAIN


def test_a_period_is_of_the_kind_of_the_one_save_in_it():
    """The first save makes the arena, and two saves in one period measure neither."""
    choice, now = CopyChoice(), 0.0
    kinds = []
    for saves, seconds in [(0, 1.0), (1, 5.0), (0, 1.0), (1, 2.0), (2, 9.0), (1, 3.0), (0, 1.0)]:
        kinds += [choice.next() for _ in range(saves)]
        now += seconds
        choice.on_step(now)
    assert kinds == [PLAIN, OVERLAP, PLAIN, PLAIN, PLAIN]
    assert {kind: list(seen) for kind, seen in choice._periods_s.items()} == {
        NONE: [1.0, 1.0],
        OVERLAP: [2.0],
        PLAIN: [3.0],
    }


def test_what_is_copied_while_training_waits_by_choice_is_digested_too():
    """Where there is no choice, nobody knows whether a core is free to digest it."""
    model = nn.Linear(2, 2)
    copying = StateCopier(
        registry(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)),
        prepare=lambda: None,
        before_step=lambda: None,
        on_wait=lambda _: None,
        num_threads=1,
        device_copier=DeviceCopier(),
    )
    try:
        assert copying.stage_arguments(set()) == {}
        assert copying.stage_arguments({"w"}) == {"digests": True}
        assert copying.stage_arguments({"w"}) == {"later": {"w"}}
    finally:
        copying.close()
