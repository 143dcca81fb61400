"""Programs of real ranks, each a host of its own: what others keep is damaged, or hosts are lost.

Every rank has a name and a folder of memory that only it knows. All that is to be seen happens in
one process a rank, attempt after attempt.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import socket
import time
from pathlib import Path

import torch
import torch._dynamo  # what an optimizer imports, a second or two: once for all ranks
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.end_to_end.training import content_bytes
from trainckpt import Checkpointer
from trainckpt.errors import SaveFailed
from trainckpt.format import manifest as manifests
from trainckpt.snapshot import verify, writer_client
from trainckpt.storage import replica_slots
from trainckpt.storage.shared_memory import ROOT_VARIABLE, SharedMemoryDir

OWN, COPY, PARITY, HOST, PLACE = "own", "copy", "parity", "host", "place"
WIDTH = 60
SAVING = {"every": "2 steps", "memory_every": "1 step", "keep_last": 9}


class Leave(Exception):
    """The attempt fails, and leaves what is in memory."""


class Heard(logging.Handler):
    """What is logged."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("trainckpt").addHandler(self)
        return self

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __exit__(self, *_):
        logging.getLogger("trainckpt").removeHandler(self)


def be_a_host(rank, folder):
    """Before anything is asked about memory or the host."""
    memory = Path(folder) / f"memory{rank}"
    memory.mkdir()
    os.environ[ROOT_VARIABLE] = str(memory)
    socket.gethostname = lambda: f"host{rank}"
    return memory


def play(rank, folder, chains):
    """For each chain: attempts, before each of which something is done to what hosts hold.

    Args:
        chains: Name -> options, and of each attempt: the step it trains to, and what is damaged
            then in the memory of which rank.

    Returns:
        Name -> of each attempt: where it began, its state then and at each step, what was logged,
        and whether this host's memory holds anything of a tensor that is not its own.
    """
    torch.set_num_threads(1)
    memory, found = be_a_host(rank, folder), {}
    logging.getLogger("trainckpt").setLevel(logging.DEBUG)
    for name, (options, attempts) in chains.items():
        place, seen = f"{folder}/{name}", []
        for until, damages in attempts:
            seen.append(attempt(rank, place, until, {**SAVING, **options}))
            seen[-1]["readable"] = readable(rank, place) if until > seen[-1]["began"] else []
            torch.distributed.barrier()
            for what, of in damages.get(rank, ()):
                damage(rank, place, memory, what, of)
            seen[-1]["verified"] = verified(place)
            torch.distributed.barrier()
        found[name] = seen
    return found


def attempt(rank, place, until, options):
    """Train to a step, and leave by an error once the save of that step is kept."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    wrapped = DistributedDataParallel(model)
    optimizer, states = torch.optim.AdamW(model.parameters(), 0.01), {}
    torch.manual_seed(rank + 1)
    with (
        Heard() as heard,
        contextlib.suppress(Leave),
        Checkpointer(place, model=wrapped, optimizer=optimizer, **options) as ckpt,
    ):
        began, again = ckpt.cursor.step, ckpt._attempt.saver.replication.rereplication
        assert again is None or again.join(30)
        writer_client.FROM_BYTES = 0 if "beside" in place else 64 << 20
        while True:
            ckpt.boundary()
            states[ckpt.cursor.step] = state(model, optimizer)
            if ckpt.cursor.step >= until:
                ckpt._attempt.saver.wait()
                raise Leave
            wrapped(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"began": began, "states": states, "log": heard.lines}


def state(model, optimizer):
    """Digest of parameters, moments and the generator."""
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in model.parameters():
        moments = [moment for _, moment in sorted(optimizer.state[parameter].items())]
        for tensor in (parameter, *moments):
            found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def newest(place):
    """Folder of the newest snapshot that this host holds for others; None: it holds none."""
    memory = SharedMemoryDir.found(place)
    folders = memory.folders() if memory is not None else []
    found = [
        memory.root / f for f in folders if replica_slots.MANIFEST in replica_slots.files(memory, f)
    ]
    assert len(found) <= 1
    return found[0] if found else None


def readable(rank, place):
    """Files kept for others, or sealed, in which a name of a tensor can be read."""
    files = [p for p in newest(place).iterdir() if p.name != replica_slots.MANIFEST]
    others = [
        p
        for p in files
        if not p.name.startswith(f"rank{rank:05d}.safetensors") or p.suffix == ".sealed"
    ]
    assert others
    return sorted(p.name for p in others if b"model/weight" in p.read_bytes())


def verified(place):
    """What `verify` finds of the newest snapshot in this host's memory: good or not, by file."""
    folder = newest(place)
    if folder is None:
        return {}
    manifest = manifests.load((folder / replica_slots.MANIFEST).read_bytes(), "it")
    return {copy.file: copy.ok for copy in verify.verify_memory(place, manifest)}


def damage(rank, place, memory, what, of):
    """Flip a bit of what this host holds of a rank, or lose the host's memory; or lose what the
    run's place has of the newest snapshot.
    """
    if what == PLACE:
        shutil.rmtree(Path(place) / "snapshots" / newest(place).name)
        return
    if what == HOST:
        shutil.rmtree(memory)
        memory.mkdir()
        socket.gethostname = lambda: f"another{rank}"
        return
    end = "*.parity" if what == PARITY else f"rank{of:05d}.safetensors*"
    found = list(newest(place).glob(end))
    assert found, (what, of)
    for path in found:
        at = (content_bytes(path) if path.suffix == ".safetensors" else path.stat().st_size) - 5
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 16]))


UNDER_WAY = 8  # keys that are about to be deleted when one looks


def num_keys(ckpt, found, limit_s=20.0):
    """In the ranks' store. What is being forgotten by other threads is waited for, until there are
    hardly more keys than were `found` before.
    """
    torch.distributed.barrier()
    store, until_s = ckpt._context.channel.torch_store, time.monotonic() + limit_s
    while found and store.num_keys() > found[0] + UNDER_WAY and time.monotonic() < until_s:
        time.sleep(0.01)
    number = store.num_keys()
    torch.distributed.barrier()
    return number


def save_often(rank, folder, looks):
    """Keys in the ranks' store after so many saves, each asked for, kept by others and copied; and
    how long one is tried to be kept that only rank 0 has let go of.
    """
    torch.set_num_threads(1)
    be_a_host(rank, folder)
    model, found = nn.Linear(4, 4), []
    wrapped, options = DistributedDataParallel(model), {"every": "never", "keep_last": 2}
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with Checkpointer(
        f"{folder}/run",
        model=wrapped,
        optimizer=optimizer,
        redundancy="partner",
        tiers=[f"{folder}/slow"],
        durable=f"{folder}/slow",
        **options,
    ) as ckpt:

        def save():
            pending = ckpt.save()
            while pending.snapshot is None:
                ckpt.boundary()
                wrapped(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return pending

        for number in range(1, max(looks) + 1):
            pending = save()
            pending.wait("partner", 30)
            pending.wait("durable", 30)
            if number in looks:
                found.append(num_keys(ckpt, found))
        if rank == 0:
            ckpt._attempt.saver.replication.pause()
        begun_s, pending = time.monotonic(), save()
        with contextlib.suppress(SaveFailed):
            pending.wait("partner", 60)
        ckpt._attempt.saver.replication.unpause()
        return found, (pending.why_not_replicated, time.monotonic() - begun_s)


class Grows:
    """One element more with each save; on the other rank two, and now and then none."""

    def __init__(self, rank):
        self.rank, self.kept = rank, torch.zeros(0)

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]

    def go_on(self, number):
        if number % 3:
            self.kept = torch.cat([self.kept, torch.full((1 + self.rank,), float(number))])


def save_what_grows(rank, folder, looks):
    """Keys in the ranks' store after so many saves of a tensor that is never as large as before,
    and what the next attempt finds of it.
    """
    torch.set_num_threads(1)
    model, grows, found = nn.Linear(4, 4), Grows(rank), []
    with Checkpointer(f"{folder}/run", model=model, grows=grows, every="never") as ckpt:
        for number in range(1, max(looks) + 1):
            grows.go_on(number)
            if number % 2:  # two tables that take turns
                model.weight.grad = None
            else:
                model.weight.grad = torch.ones(4, 4)
            pending = ckpt.save()
            while pending.snapshot is None:
                ckpt.boundary()
            pending.wait("local", 30)
            if number in looks:
                found.append(num_keys(ckpt, found))
    again = Grows(rank)
    with Checkpointer(f"{folder}/run", model=nn.Linear(4, 4), grows=again, every="never"):
        pass
    return found, torch.equal(again.kept, grows.kept)
