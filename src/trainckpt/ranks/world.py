"""Read this process's place among the ranks, once, as a Checkpointer is made."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed

from trainckpt.errors import ConfigurationError


@dataclass(frozen=True)
class World:
    """This process among all processes of the attempt.

    Attributes:
        rank: 0 to size - 1, over all hosts.
        size: Number of ranks.
        local_rank: This rank's number on its own host.
        host: Name of that host.
    """

    rank: int
    size: int
    local_rank: int
    host: str


def current_world() -> World:
    """Return the world of `torch.distributed`, or one rank if no process group exists.

    Raises:
        ConfigurationError: a launcher started several ranks, and the group is not there yet.
    """
    host = socket.gethostname()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return World(rank, size, _number("LOCAL_RANK", rank), host)
    launched = _number("WORLD_SIZE", 1)
    if launched > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {launched}, but torch.distributed has no process group",
            hint="call torch.distributed.init_process_group before Checkpointer; Lightning does by "
            f"Trainer(devices={launched}, strategy='ddp')",
        )
    return World(0, 1, 0, host)


def collective_timeout_s() -> float:
    """Return how long training's own collectives wait for a rank, in seconds; infinity if
    unknown."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return math.inf
    try:
        from torch.distributed import distributed_c10d

        group: Any = distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        found = [backend.options._timeout.total_seconds() for backend in backends]
    except (AttributeError, RuntimeError, ValueError):  # a backend without such options
        return math.inf
    return min(found, default=math.inf)


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"{variable} is {text!r}, which is not a number",
            hint=f"unset {variable}, or start the ranks with torchrun",
        ) from None
