"""Programs of real ranks whose run lies in an object store; each is told where to find it.

Ranks are forked from a server that was started before the store was, so they get its environment
as an argument.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from itertools import count
from pathlib import Path

import s3fs  # so that what the ranks are forked from has it

from tests.end_to_end import ranks
from trainckpt import Checkpointer
from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.storage.shared_memory import ROOT_VARIABLE

assert s3fs
WIDE = 1200  # 17 MB with the moments: what is read beside them is little


class Leave(Exception):
    """What was to be seen was seen."""


def train(rank, environment, place, world, until, options=None, width=ranks.WIDTH):
    """As `ranks.train`."""
    os.environ.update(environment)
    ranks.WIDTH = width
    return ranks.train(rank, place, world, until, **(options or {}))


def train_and_log(rank, environments, place, world, until):
    """As `train` with an environment for each rank and a save at each step; warnings as well."""
    os.environ.update(environments[rank])
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("trainckpt").addHandler(handler)
    losses, _ = ranks.train(rank, place, world, until, every="1 steps")
    return losses, lines


def train_until_killed(rank, environment, place, world, micro_batches, options):
    """As `train`, killed in the micro-batch after so many, once a snapshot is in each tier."""
    os.environ.update(environment)
    seen = count()

    def forward(*_):
        if next(seen) == micro_batches:
            for url in (place, options["tiers"]):
                wait_for_snapshot(url)
            os.kill(os.getpid(), signal.SIGKILL)

    def act(_, model):
        model.register_forward_pre_hook(forward)

    ranks.train(rank, place, world, 99, act=act, every="1 step", **options)


def wait_for_snapshot(url):
    """Until a manifest is there."""
    tier = open_run_tier(url)
    while not any(
        tier.size(f"{names.SNAPSHOTS}/{name}/{names.MANIFEST}")
        for name in tier.list(names.SNAPSHOTS)
    ):
        time.sleep(0.05)


def arrive(rank, environment, place, world, memory=None, host=None):
    """Go on, train one micro-batch, and leave by an exception: nothing is saved.

    Args:
        memory: Folder of this host's memory; "{rank}" in it makes each rank a host of its own.
        host: Its name, in the same way.
    """
    os.environ.update(environment)

    if memory is not None:
        Path(memory.format(rank=rank)).mkdir(exist_ok=True)
        os.environ[ROOT_VARIABLE] = memory.format(rank=rank)
    if host is not None:
        socket.gethostname = lambda: host.format(rank=rank)
    ranks.WIDTH = WIDE
    model, optimizer, loader = ranks.parts(rank, world)
    with (
        contextlib.suppress(Leave),
        Checkpointer(place, model=model, optimizer=optimizer, loader=loader) as ckpt,
    ):
        for (x,) in ckpt.batches():
            model(x).sum().backward()
            raise Leave
    return ckpt.resumed_from.step


def refused(rank, environment, places, world, options):
    """The error that a start ends with, each rank with its own place and options; else None."""
    os.environ.update(environment)
    try:
        ranks.train(rank, places[rank], world, 1, **options[rank])
    except TrainckptError as error:
        return type(error).__name__, error.exit_code, f"{error.message}; {error.hint}"
    return None
