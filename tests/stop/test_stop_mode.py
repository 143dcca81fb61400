"""Where a stop falls: a table of facts and answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from trainckpt.attempt.options import read_options
from trainckpt.attempt.progress_counter import ProgressCounter
from trainckpt.save.estimates import Timings
from trainckpt.state.registry import Registry
from trainckpt.stop.stop_mode import (
    StopFacts,
    StopModeChooser,
    choose_mode,
    must_tighten_after_s,
    predicted_save_s,
)

# 1 GB of state and 0.5 GB of gradients at 1 GB/s; windows of 8 micro-batches of 1 s each.
AUTO = StopFacts(
    stop_at="auto",
    micro=2,
    window=8,
    micro_batch_s=1.0,
    state_bytes=10**9,
    gradient_bytes=5 * 10**8,
    seconds_per_byte=1e-9,
    file_bytes=15 * 10**8,
    memory_budget=10**10,
)


@pytest.mark.parametrize(
    ("facts", "left_s", "mode"),
    [
        (AUTO, None, "micro-batch"),  # gradients cost 1 s, the window's end is 6 s away
        (replace(AUTO, micro=7, micro_batch_s=0.5), None, "window"),  # 0.5 s away
        (replace(AUTO, micro=7, micro_batch_s=0.5), 1.0, "micro-batch"),  # and would be too late
        (replace(AUTO, memory_budget=10**9), None, "window"),  # no room for gradients
        (replace(AUTO, memory_budget=10**9, file_bytes=10**9), None, "micro-batch"),  # its part
        (replace(AUTO, memory_budget=None, micro=7, micro_batch_s=0.1), None, "window"),
        (replace(AUTO, window=None), None, "micro-batch"),
        (replace(AUTO, micro_batch_s=None), None, "micro-batch"),
        (replace(AUTO, seconds_per_byte=None), None, "micro-batch"),
        (replace(AUTO, stop_at="window"), 0.1, "window"),
        (replace(AUTO, stop_at="window", window=None), None, "micro-batch"),
        (replace(AUTO, stop_at="micro-batch", micro=7, micro_batch_s=0.1), None, "micro-batch"),
    ],
)
def test_the_micro_batch_unless_the_window_s_end_is_in_time_and_cheaper(facts, left_s, mode):
    found, why = choose_mode(facts, left_s)
    assert found == mode
    assert why


def test_a_window_is_given_up_early_enough_for_two_micro_batches_and_the_save():
    """Measured: with gradients, with caution. Not measured: half of what is left."""
    save_s = predicted_save_s(15 * 10**8, 1e-9)
    assert must_tighten_after_s(AUTO, 10.0) == pytest.approx(10 - 2 - save_s)
    assert must_tighten_after_s(replace(AUTO, seconds_per_byte=None), 10.0) == pytest.approx(3.0)
    assert must_tighten_after_s(AUTO, 1.0) == 0.0


def test_the_ranks_of_a_host_share_its_memory_budget():
    """Each has 64 bytes of parameters and as many of gradients."""
    registry = Registry()
    registry.add("model", nn.Linear(4, 4, bias=False))
    chooser = StopModeChooser(
        options=read_options({"memory_budget": 1024, "accumulate": 4}),
        registry=registry,
        position=ProgressCounter(4),
        timings=Timings(),
        world_size=16,
    )
    assert chooser.facts().memory_budget is None  # the other ranks are not there yet
    chooser.set_ranks_here(8)
    assert chooser.facts().file_bytes == chooser.facts().memory_budget == 128
    assert chooser.mode(None) == "micro-batch"
    chooser.set_ranks_here(9)
    assert chooser.mode(None) == "window"
