"""Whatever is not restored shows, and the proof names it.

Each kind of state is left out of one resume, inside a window of the second epoch. The recorded
run must then differ from the uninterrupted one, first in that very part, and it must do harm: the
weights at the end are others. A proof that passes is worth as much as this test.
"""

from __future__ import annotations

import re

import pytest

from trainckpt.prove.compare import BATCH, PARAMETER, blame, first_difference
from trainckpt.state import apply

# kind -> ranks on which it shows, what the proof must say first
NAMED = {
    "DDP bucket order": (3, r"DDP bucket order of model .*"),
    "DDP forward sync": (3, r"DDP forward-sync flag of model \(True instead of False\)"),
    "rank-local buffers": (3, r"buffer model/norm\.running_mean"),
    "gradients": (3, r"gradient of model/first\.bias \(missing\)"),
    "parameters": (1, r"parameter model/first\.bias"),
    "buffers": (1, r"buffer model/norm\.num_batches_tracked"),
    "optimizers": (1, r"optimizer: lr of group 0 \(0\.01 instead of .*\)"),
    "objects": (1, r"scheduler: _last_lr\.0 \(0\.01 instead of .*\)"),
    "moments' type": (
        1,
        r"optimizer exp_avg of model/narrow\.bias \(bfloat16 instead of float32\)",
    ),
    "python RNG": (1, "Python RNG"),
    "numpy RNG": (1, "NumPy RNG"),
    "torch RNG": (1, "torch RNG"),
    "RNG last": (1, "torch RNG"),
    "python RNG of workers": (1, r"Python RNG of worker \d"),
    "numpy RNG of workers": (1, r"NumPy RNG of worker \d"),
    "torch RNG of workers": (1, r"torch RNG of worker \d"),
    "sampler seed": (1, r"sampler seed \(0 instead of 1000\)"),
    "loaders": (1, r"sampler seed \(0 instead of 1000\)"),
}
FIND_UNUSED = "DDP used parameters"  # needs DDP's find_unused_parameters, which has no buckets
HOOKS = "DDP communication hooks"  # tests/end_to_end/test_ddp_kinds.py has such
PLAIN_TENSORS = "plain tensors"  # tests/state/test_plain_tensors.py restores them over others
FSDP2 = "FSDP2's gradients"  # tests/state/test_fsdp.py leaves them out

DEEPSPEED = {
    "DeepSpeed's counters",
    "DeepSpeed's gradients",
}  # tests/integrations/test_deepspeed.py


def differences(setting, broken):
    resumed = setting.resumed(broken)
    return resumed, first_difference(setting.straight, [setting.stopped, resumed])


def final_weights(records):
    """Of each rank at its last boundary."""
    return {
        rank: {part: text for part, text in last["parts"].items() if blame(part) == PARAMETER}
        for rank, record in records.items()
        for last in [[entry for entry in record.values() if "parts" in entry][-1]]
    }


def test_every_step_of_the_restore_is_switched_off_by_some_case():
    """The order of the restore is data; a step added to it needs a case here."""
    assert {name for name, *_ in apply.STEPS} <= {
        *(*NAMED, FIND_UNUSED, HOOKS, PLAIN_TENSORS, FSDP2, *DEEPSPEED),
    }


@pytest.mark.parametrize(("world", "flags"), [(1, ()), (3, ()), (3, ("--find-unused",))])
def test_a_resume_that_restores_everything_is_exact(settings, world, flags):
    """Without sabotage nothing differs; else the other tests would show nothing."""
    setting = settings(world, *flags)
    resumed, difference = differences(setting, "nothing")
    assert difference is None
    assert sorted(setting.straight) == sorted(resumed) == list(range(world))
    assert final_weights(setting.straight) == final_weights(resumed)


@pytest.mark.parametrize("broken", NAMED)
def test_what_is_not_restored_is_named_first_and_does_harm(settings, broken):
    """One kind of state keeps what the fresh process has."""
    world, named = NAMED[broken]
    setting = settings(world)
    resumed, difference = differences(setting, broken)
    assert difference is not None
    # what made it another batch
    parts = [part for part in difference.parts if not part.startswith(BATCH)]
    assert re.fullmatch(named, parts[0]), difference
    assert (difference.step, difference.micro) == (setting.stop_at // 3, setting.stop_at % 3)
    assert final_weights(setting.straight) != final_weights(resumed)


def test_parameters_that_only_an_earlier_micro_batch_used(settings):
    """DDP forgets them: their gradients are not reduced, and only on that layer it shows."""
    setting = settings(3, "--find-unused")
    resumed, difference = differences(setting, FIND_UNUSED)
    assert difference is not None
    assert "model/extra." in difference.parts[0], difference
    assert final_weights(setting.straight) != final_weights(resumed)


def test_a_scheduler_that_was_not_passed_is_named(settings):
    """The commonest mistake: the proof says that it is not tracked, and of what class it is."""
    setting = settings(1, "--forget-scheduler")
    resumed, difference = differences(setting, "nothing")
    assert difference is not None
    assert difference.parts[0] == "CosineAnnealingLR, which is not tracked"
    assert final_weights(setting.straight) != final_weights(resumed)
