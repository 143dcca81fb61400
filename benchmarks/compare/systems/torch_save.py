"""torch.save as everybody uses it under DDP: rank 0 saves, all load. With fsync and rename."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from benchmarks.compare.systems.base import Pending, System

if TYPE_CHECKING:
    from benchmarks.compare.training import Training


class TorchSave(System):
    def save(self) -> Pending:
        path = self.new_path()
        if self.rank == 0:
            path.mkdir(parents=True)
            state = {
                "model": self.training.plain.state_dict(),
                "optimizer": self.training.optimizer.state_dict(),
            }
            with (path / "state.tmp").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            (path / "state.tmp").rename(path / "state.pt")
            folder = os.open(path, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        return Pending()

    def restore(self, training: Training, *, memory: bool) -> None:
        state = torch.load(self.path / "state.pt", map_location=training.device, weights_only=True)
        training.plain.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])


SYSTEM = TorchSave
