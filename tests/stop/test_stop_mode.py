"""Where a stop falls: a table of facts and answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

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


def chooser(model, *, world_size, ranks_here):
    registry = Registry()
    registry.add("model", model)
    return StopModeChooser(
        options=read_options({"memory_budget": 1024, "accumulate": 4}),
        registry=registry,
        position=ProgressCounter(4),
        timings=Timings(),
        world_size=world_size,
        ranks_here=ranks_here,
    )


def test_the_ranks_of_a_host_share_its_memory_budget():
    """Each has 64 bytes of parameters and as many of gradients."""
    model = nn.Linear(4, 4, bias=False)
    of_eight = chooser(model, world_size=16, ranks_here=8)
    assert of_eight.facts().file_bytes == of_eight.facts().memory_budget == 128
    assert of_eight.mode(None) == "micro-batch"
    assert chooser(model, world_size=16, ranks_here=9).mode(None) == "window"


def test_under_ddp_the_gradients_of_all_ranks_count():
    """Each rank stores its own ones of an open window: they are reduced at its end."""
    model = nn.Linear(4, 4, bias=False)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        under_ddp = chooser(DistributedDataParallel(model), world_size=4, ranks_here=4).facts()
    finally:
        distributed.destroy_process_group()
    plain = chooser(model, world_size=4, ranks_here=4).facts()
    assert (plain.gradient_bytes, under_ddp.gradient_bytes) == (64, 4 * 64)
    one, all_ranks = (replace(AUTO, gradient_bytes=n) for n in (5 * 10**8, 4 * 5 * 10**8))
    assert must_tighten_after_s(all_ranks, 10.0) < must_tighten_after_s(one, 10.0)
