"""torchtitan: a checkpoint manager that its configuration chooses, exact at the micro-batch.

    torchrun ... -m torchtitan.train --module llama3 --config llama3_8b --checkpoint.enable \\
      --override.imports trainckpt.torchtitan.checkpoint_manager

or, in a function of a config registry,

    checkpoint=trainckpt.torchtitan.CheckpointManager.Config(enable=True, interval=100)

docs/torchtitan.md says what becomes of each key of `[checkpoint]`.
"""

from __future__ import annotations

from typing import Any

from trainckpt.integrations.compat import require

require("torchtitan", "torchtitan")

from torchtitan.components.checkpointer import BaseCheckpointManager  # noqa: E402
from torchtitan.config.override import override  # noqa: E402

from trainckpt.integrations.torchtitan_manager import (  # noqa: E402
    TorchtitanManager as CheckpointManager,
)
from trainckpt.integrations.torchtitan_manager import config_in_place_of  # noqa: E402

__all__ = ["CheckpointManager", "checkpoint_manager"]


@override(target=BaseCheckpointManager.Config, description="checkpoints by trainckpt")  # type: ignore[untyped-decorator]
def checkpoint_manager(config: Any, **options: Any) -> Any:
    """Return the configuration of trainckpt's manager in place of another manager's.

    Named by `--override.imports`, as `trainckpt.torchtitan.checkpoint_manager`, or with options:
    `'trainckpt.torchtitan.checkpoint_manager={"every": "10 min"}'`.
    """
    return config_in_place_of(config, options)
