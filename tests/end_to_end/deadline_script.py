"""A small training for the tests of deadlines; says "at <micro-batches>" before each one.

    python -m tests.end_to_end.deadline_script RUN JSON

JSON: micro_s (a micro-batch's length), accumulate, until (micro-batches), slow_from (the
how-manieth shard file from which on the disk takes slow_s for each), slow_read_s, hang_at
(micro-batch in which main hangs) and hang_on (rank), late (that rank makes its Checkpointer once
this file is there), idle_s (between making it and entering it), slow_record_s, options (of the
Checkpointer). With RANK set: gloo.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed
from torch import nn

import trainckpt
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import Disk, LocalTier

# Every save is logged, not one a minute: tests wait for some.
HANDLER = logging.StreamHandler()
HANDLER.setFormatter(logging.Formatter("trainckpt: %(message)s"))
logging.getLogger("trainckpt").addHandler(HANDLER)
logging.getLogger("trainckpt").setLevel(logging.DEBUG)


def slow_disk(first: int, seconds: float) -> None:
    """From shard file number `first` on, each takes so long to write: a disk under load."""
    write, seen = Disk.write, set()

    def slow(self, path, descriptor, block, first_byte):
        if path.suffix == ".safetensors" and path not in seen:
            seen.add(path)
            if len(seen) >= first:
                time.sleep(seconds)
        write(self, path, descriptor, block, first_byte)

    Disk.write = slow


def slow_reads(seconds: float) -> None:
    """Each read of a shard file takes so long."""
    read = LocalTier.read_parts

    def slow(self, key, *parts):
        if key.endswith(".safetensors"):
            say("reading")
            time.sleep(seconds)
        read(self, key, *parts)

    LocalTier.read_parts = slow


def slow_records(seconds: float) -> None:
    """The record of how the attempt ended takes so long to write."""
    replace = attempt_history.replace

    def slow(tier, record):
        if record.outcome is not None:
            time.sleep(seconds)
        replace(tier, record)

    attempt_history.replace = slow


def say(line) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(
    run,
    micro_s=0.01,
    accumulate=4,
    until=10**6,
    slow_from=0,
    slow_s=0.0,
    slow_read_s=0.0,
    hang_at=-1,
    hang_on=0,
    late="",
    idle_s=0.0,
    slow_record_s=0.0,
    options=None,
):
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    if slow_from:
        slow_disk(slow_from, slow_s)
    if slow_read_s:
        slow_reads(slow_read_s)
    if slow_record_s:
        slow_records(slow_record_s)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = [torch.randn(8) for _ in range(until)] if until < 10**4 else Endless()
    loader = torch.utils.data.DataLoader(data, 1)
    say("begun")
    while late and rank == hang_on and not Path(late).exists():
        time.sleep(0.01)
    made = trainckpt.Checkpointer(
        run, model=model, optimizer=optimizer, loader=loader, **(options or {})
    )
    say("made")
    time.sleep(idle_s)
    with made as ckpt:
        for batch in ckpt.batches():
            at = ckpt.cursor.micro_batches
            say(f"at {at}")
            if at == hang_at and rank == hang_on:
                say("hanging")
                time.sleep(600)
            time.sleep(micro_s)
            model(batch).sum().backward()
            if at % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()


class Endless(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return torch.full((8,), float(index % 7))


if __name__ == "__main__":
    try:
        main(sys.argv[1], **json.loads(sys.argv[2]))
    except trainckpt.TrainckptError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
