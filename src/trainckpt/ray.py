"""Ray Train: a Checkpointer for the training function of a `TorchTrainer`.

    def train(config):
        model = ray.train.torch.prepare_model(Net())
        ...
        with trainckpt.ray.Checkpointer(model=model, optimizer=optimizer, loader=loader) as ckpt:
            for epoch in ckpt.epochs(3):
                for batch in ckpt.batches():
                    ...

docs/ray.md says what Ray restarts, and what a stop means there.
"""

from __future__ import annotations

from trainckpt.integrations.compat import require

require("ray.train", "ray")

from trainckpt.integrations.ray_checkpointer import (  # noqa: E402 - the extra is asked for first
    RayCheckpointer as Checkpointer,
)
from trainckpt.integrations.ray_report import snapshot_of  # noqa: E402

__all__ = ["Checkpointer", "snapshot_of"]
