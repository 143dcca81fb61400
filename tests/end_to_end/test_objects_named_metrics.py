"""A tracked object may be called `metrics`, as the option is: the option is a text."""

from __future__ import annotations

import pytest
from torch import nn

from trainckpt import Checkpointer
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.lightning_callback import TrainerCheckpointer


class Accuracy:
    def __init__(self):
        self.count = 3

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def by_a_script(run, accuracy, **options):
    return Checkpointer(run, model=nn.Linear(2, 2), metrics=accuracy, **options)


def by_a_trainer(run, accuracy, **options):
    tracked = {"model": nn.Linear(2, 2), "metrics": accuracy}
    return TrainerCheckpointer(run, tracked, {"metrics": f"textfile:{run.parent}", **options})


def test_a_name_of_the_trainers_own_objects_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="metrics: an object of the Trainer"):
        by_a_trainer(tmp_path / "run", Accuracy(), metrics=Accuracy())


@pytest.mark.parametrize("make", [by_a_script, by_a_trainer])
def test_an_object_called_metrics_is_restored(tmp_path, make):
    for resume in ("never", "required"):
        accuracy = Accuracy()
        with make(tmp_path / "run", accuracy, resume=resume, every="never") as ckpt:
            assert (ckpt.options.metrics is None) == (make is by_a_script)
            accuracy.count += resume == "never"
    assert accuracy.count == 4
