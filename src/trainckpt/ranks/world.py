"""Read this process's place among the ranks, once, as a Checkpointer is made."""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed

from trainckpt.errors import ConfigurationError, NoAgreement
from trainckpt.ranks.store import WAITED, connect

if TYPE_CHECKING:
    from trainckpt.ranks.store import RankStore


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


# ---- the name of this start of the ranks
#
# The store may be that of a torchrun agent, and hold keys of earlier starts. No environment
# variable tells starts apart: TORCHELASTIC_RESTART_COUNT differs between agents once a single one
# has failed or joined. So rank 0 makes up a name, and gives it to every present rank:
#
#     rank r    puts a random word as its greeting, and waits for the name under that word
#     rank 0    answers each greeting it finds, until every rank has confirmed the name
#
# A greeting left by an older start is answered too, but no rank waits for that answer.
#
# Threads: the training's.


WITHIN_S = 600.0  # ranks may load a large model before they make their Checkpointer
LOOK_S, LONGEST_LOOK_S = 0.005, 0.2
HINT = f"make the Checkpointer on every rank, and resume on all; {WAITED}"


def agree_on_name(world: World, within_s: float = WITHIN_S) -> str:
    """Return the name of this start. Every rank calls it, and waits for the others.

    Raises:
        NoAgreement: some rank did not come in time; the message names it.
    """
    word = secrets.token_hex(8)
    if world.size == 1:
        return word
    channel = connect(world, "start")
    if world.rank == 0:
        _answer(channel, word, within_s)
        return word
    channel.put(_greeting(world.rank), word)
    if not channel.wait(f"name/{word}", within_s):
        raise NoAgreement(
            f"rank {world.rank} waited {within_s:g} s for rank 0 to begin the attempt", hint=HINT
        )
    name = str(channel.peek(f"name/{word}"))
    channel.put(_has_it(name, world.rank), True)
    return name


def _answer(channel: RankStore, name: str, within_s: float) -> None:
    until_s, pause_s = time.monotonic() + within_s, LOOK_S
    waiting, answered = list(range(1, channel.world.size)), set[str]()
    while True:
        have_it = channel.peek_all([_has_it(name, rank) for rank in waiting])
        waiting = [rank for rank, has in zip(waiting, have_it, strict=True) if has is None]
        if not waiting:
            break
        words = channel.peek_all([_greeting(rank) for rank in waiting])
        new = {f"name/{word}" for word in words if isinstance(word, str)} - answered
        if new:
            channel.put_all(dict.fromkeys(new, name))
            answered |= new
            pause_s = LOOK_S
        elif time.monotonic() > until_s:
            who = ", ".join(map(str, waiting))
            raise NoAgreement(
                f"rank 0 waited {within_s:g} s for rank {who} to begin the attempt", hint=HINT
            )
        else:
            time.sleep(pause_s)  # a store cannot be waited for until a value changes
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
    ranks = range(1, channel.world.size)
    channel.forget([*answered, *map(_greeting, ranks), *(_has_it(name, rank) for rank in ranks)])


def _greeting(rank: int) -> str:
    return f"greeting/{rank}"


def _has_it(name: str, rank: int) -> str:
    return f"{name}/{rank}"
