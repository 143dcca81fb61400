"""Runs that are killed while they touch shared memory: `python -m tests.end_to_end.killed FOLDER`.

Every call that a rank's memory place makes of the system is an instant, and rank 0 of an attempt
is killed just before one of them; the others when it is dead. What is left in shared memory is then
given back by the next attempt, by `trainckpt prune`, or, if the run's folder is gone, by any run.
Prints one JSON document: what became of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch.distributed import FileStore

from tests.end_to_end.training import attempt
from trainckpt.cli.main import main as command
from trainckpt.launcher import prefetch
from trainckpt.snapshot import fetch
from trainckpt.storage import arena, shared_memory
from trainckpt.storage.shared_memory import SharedMemoryDir, reclaim

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = (
    "open",
    "close",
    "fstat",
    "ftruncate",
    "posix_fallocate",
    "link",
    "statvfs",
)
MAX_ARENAS = 2


def forked(act: Callable[[], object]) -> int:
    """Its process."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    """As `Popen.returncode`."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_before(number: int) -> Callable[[], int]:
    """From now on the system call of this number, from 1, is the last thing this process does.

    Returns:
        How many there were.
    """
    done = 0

    def watched(call):
        def instead(*arguments, **keywords):
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return instead

    calls = {name: watched(getattr(os, name)) for name in CALLS}
    shared_memory.os = arena.os = SimpleNamespace(**{**vars(os), **calls})
    return lambda: done


def train(place: Path, world: int, rank: int = 0, kill: int = 0, digest: Path | None = None):
    """One rank of an attempt: killed before system call `kill`, or to the end."""
    if world > 1:
        store = FileStore(str(place) + f".store{os.getppid()}.{kill}", world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if kill and rank == 0:
        killed_before(kill)
    parts, _ = attempt(place, epochs=3, every="1 steps")
    if digest is not None:
        digest.write_text(repr(parts.state()))


def run(place: Path, world: int, kill: int = 0, digest: Path | None = None) -> int:
    """An attempt; how rank 0 ended. Once it is killed so are the others."""
    ranks = [forked(lambda r=r: train(place, world, r, kill, digest)) for r in range(world)]
    code = ended(ranks[0])
    for pid in ranks[1:]:
        if code:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended(pid)
    return code


def left(place: Path) -> dict[str, object]:
    """Of this run, in shared memory."""
    found = SharedMemoryDir.found(str(place))
    files = sorted((found.root / "arenas").glob("*")) if found else []
    return {
        "there": found is not None,
        "arenas": [file.name for file in files],
        "bytes": found.num_bytes if found else 0,
    }


def after(place: Path, way: str, world: int, straight: str) -> dict[str, object]:
    """What the next attempt, `prune` or the end of the run's folder makes of what was left."""
    if way == "attempt":
        digest = place.with_suffix(".digest")
        code = run(place, world, digest=digest)
        return {"code_after": code, "exact": digest.exists() and digest.read_text() == straight}
    if way == "prune":
        with contextlib.redirect_stdout(sys.stderr):
            return {"code_after": command(["prune", str(place)]), "exact": True}
    shutil.rmtree(place)
    reclaim()
    return {"code_after": 0, "exact": True}


def case(folder: Path, number: int, kill: int, straight: str, calls: int) -> dict[str, object]:
    """One kill, and what comes after it."""
    world, way = (1, 2)[number % 2], ("attempt", "prune", "gone")[number % 3]
    place = folder / f"{number}"
    place.mkdir()
    code = run(place, world, kill)
    if number % 4 == 3 and (held := SharedMemoryDir.found(str(place))) is not None:
        held.remove()  # and once more, while what a new host lacks is brought there
        ended(forked(lambda: (killed_before(kill % 20 + 5), prefetch.main([str(place)]))))
    before, heartbeats = left(place), place / "attempts"
    for beat in heartbeats.glob("*.heartbeat"):
        os.utime(beat, (0, 0))  # else `prune` takes the attempt for alive
    result = after(place, way, world, straight)
    result["exact"] |= world > 1  # that is another run
    return {
        "world": world,
        "way": way,
        "kill": kill,
        "of": calls,
        "code": code,
        "before": before,
        "after": left(place),
        **result,
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.end_to_end.killed", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    print(json.dumps(all_cases(parser.parse_args())))


def all_cases(asked: argparse.Namespace) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    fetch.PART_BYTES = 4096
    attempt(asked.folder / "warm")  # imports all that is ever imported
    digest, counted = asked.folder / "straight", asked.folder / "counted"

    def count() -> None:
        said = killed_before(0)
        train(asked.folder / "run", 1, digest=digest)
        counted.write_text(str(said()))

    assert ended(forked(count)) == 0
    calls, rng = int(counted.read_text()), random.Random(asked.seed)
    step = 0.8 * calls / asked.cases  # every part of an attempt gets its share
    kills = [int(n * step + rng.random() * step) + 1 for n in range(asked.cases)]
    rng.shuffle(kills)
    return [case(asked.folder, n, kill, digest.read_text(), calls) for n, kill in enumerate(kills)]


if __name__ == "__main__":
    main()
