"""Many saves in one process, and what it holds of the machine after some of them.

    python -m tests.end_to_end.many_saves FOLDER --saves 500

Prints one JSON document: kind of memory -> list of what was held, the first after WARM_UP saves.
Every other save is overlapped with training, every other is copied at the boundary.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainckpt import Checkpointer
from trainckpt.save import copying
from trainckpt.save.copying import OVERLAP, PLAIN
from trainckpt.snapshot import writer_client
from trainckpt.snapshot.attempt_history import read_attempts, run_id
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE, SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP = 50  # saves after which nothing may grow any more
# Of memory -> its budget; "beside" is shared memory whose files another process writes.
KINDS = {"beside": "40 %", "shared": "40 %", "private": "40 %", "none": "1 kb"}
SHARED = ("beside", "shared")
BESIDE_FROM_BYTES = 1 << 20


def by_turns() -> Callable[[copying.CopyChoice], str]:
    """Instead of what is measured: every other save is overlapped."""
    kinds = itertools.cycle([OVERLAP, PLAIN])
    return lambda _: next(kinds)


def children() -> list[str]:
    """Processes that write files for this one, started by any of its threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # that thread has just ended
            found += (task / "children").read_text().split()
    return [pid for pid in found if _writes(pid)]


def _writes(pid: str) -> bool:
    try:
        return b"writer_process" in (Path("/proc") / pid / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return False


def held(place: str, ckpt: Checkpointer) -> dict[str, int]:
    """What this process, its memory place, its run and the ranks' store hold now."""
    memory = SharedMemoryDir.found(place)
    maps = Path("/proc/self/maps").read_text().splitlines()
    snapshots = Path(place) / "snapshots"
    ours = children()
    others = [Path("/proc") / pid / "fd" for pid in ours]
    return {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "processes": len(ours),
        "their descriptors": sum(1 for folder in others for _ in folder.iterdir()),
        "arenas mapped": sum("/arenas/" in line for line in maps),
        "mappings": len(maps),
        "memory bytes": memory.num_bytes if memory else 0,
        "memory files": sum(1 for _ in memory.root.rglob("*")) if memory else 0,
        "resident bytes": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        "files": sum(1 for _ in snapshots.rglob("*")),
        "keys": ckpt._context.channel.torch_store.num_keys(),
    }


def save_often(
    place: str, budget: str, saves: int, looks: int = 1, warm_up: int = WARM_UP
) -> list[dict[str, int]]:
    """Train one step a save; look after `warm_up` saves, and `looks` times more until the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    marks = {warm_up + (saves - warm_up) * n // looks for n in range(looks + 1)}
    found, data = [], torch.randn(4, 256)
    with Checkpointer(
        place, model=model, optimizer=optimizer, every="1 steps", memory_budget=budget
    ) as ckpt:
        for number in range(saves + 1):
            ckpt.boundary()
            if number in marks:
                ckpt._attempt.saver.wait()
                newest = ckpt._attempt.saver.committed
                assert newest is not None
                assert newest[1].step == number, f"save {number} was not taken: {newest[0]}"
                found.append({"saves": number - ckpt._attempt.saver.skipped, **held(place, ckpt)})
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    tier = LocalTier(place)
    assert any(c.usable for c in read_catalog(tier, run_id(tier), read_attempts(tier)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.end_to_end.many_saves", description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--saves", type=int, default=500, help="of each kind (%(default)s)")
    parser.add_argument("--looks", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of memory (%(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    copying.CopyChoice.next = by_turns()
    root, report = os.environ.get(ROOT_VARIABLE), {}
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for kind in asked.kinds.split(","):
            shared = kind in SHARED
            writer_client.FROM_BYTES = BESIDE_FROM_BYTES if kind == "beside" else 1 << 40
            os.environ.update({ROOT_VARIABLE: root} if shared and root else {})
            os.environ.update({} if shared else {ROOT_VARIABLE: NONE})
            place = str(Path(folder) / kind)
            report[kind] = save_often(place, KINDS[kind], asked.saves, asked.looks)
            assert SharedMemoryDir.found(place) is None, "a finished run keeps its memory"
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
