"""torch.distributed.checkpoint, synchronous: every rank writes a share, files are fsynced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from benchmarks.compare.systems.base import Pending, System
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

if TYPE_CHECKING:
    from benchmarks.compare.training import Training


class Dcp(System):
    def save(self) -> Pending:
        dcp.save(state_of(self.training), checkpoint_id=self.new_path())
        return Pending()

    def restore(self, training: Training, *, memory: bool) -> None:
        state = state_of(training)  # this lets the optimizer allocate its state
        dcp.load(state, checkpoint_id=self.path)
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def state_of(training: Training) -> dict[str, Any]:
    """The state in DCP's own form."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


SYSTEM = Dcp
