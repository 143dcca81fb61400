"""What both examples do before they train: flags, refusals, ranks and seeds.

Order of events: `parse` (refuses what cannot work, before anything is created), `process_group`
(the ranks find each other), then the script builds its model and calls `seed_everything`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from trainckpt.errors import ConfigurationError, TrainckptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says; 1 under plain python


def parser(doc: str, run: str, layouts: Sequence[str] = ("none", "ddp")) -> argparse.ArgumentParser:
    """The flags every example has; `doc` is its docstring, `run` its default place."""
    flags = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("--run", metavar="URL", default=run, help="where the checkpoints lie (%(default)s)")
    add("--steps", type=int, default=200, help="optimizer steps to train (%(default)s)")
    add("--accumulate", type=int, default=4, help="micro-batches per step (%(default)s)")
    add("--parallel", choices=layouts, default="none" if WORLD == 1 else "ddp")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=20, help="steps between two saves (%(default)s)")
    add("--workers", type=int, default=2, help="data loader workers per rank (%(default)s)")
    add("--trace", metavar="DIR", help="record every micro-batch in this folder")
    add("--dropout", type=float, default=0.1)
    add("--batch-size", type=int, default=4, help="per rank and micro-batch (%(default)s)")
    add("--size", choices=["small", "medium", "large"], default="small")
    return flags


def parse(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and refuse what cannot work yet."""
    args = flags.parse_args()
    if args.parallel == "none" and WORLD > 1:
        raise ConfigurationError(f"--parallel none is one process, torchrun started {WORLD}")
    for name in ("steps", "accumulate", "save_every", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1")
    return args


@contextmanager
def process_group(args: argparse.Namespace) -> Iterator[int]:
    """Join the other ranks where there can be any; gives this process's rank."""
    if (WORLD > 1 or args.size == "small") and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more would only wait for each other
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
    elif args.parallel != "none":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        yield 0
        return
    yield dist.get_rank()
    dist.destroy_process_group()  # not after an error: the others may not be listening any more


def seed_everything(seed: int) -> None:
    """Start the three generators that training and data loader workers draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def show_progress(step: int, steps: int, loss: float) -> None:
    """One line of rank 0, for about twenty of the steps."""
    now_and_then = step == steps or step % max(1, steps // 20) == 0
    if now_and_then and os.environ.get("RANK", "0") == "0":
        print(f"step {step}  loss {loss:.3f}", flush=True)


def exit_with_code(main: Callable[[], None]) -> None:
    """Run `main`; an error of trainckpt becomes one sentence on stderr and its exit code."""
    try:
        main()
    except TrainckptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
