"""Saves and restores of trainckpt and its peers, beside what memory and disk can do.

    python -m benchmarks.compare --json OUT [--ranks R] [--gigabytes G] [--compute busy|off-cpu]
                                 [--systems a,b,...] [--png OUT]

Each number of ranks, size and kind of training is one job, in which all systems take turns with the
floors and with training that saves nothing. Lists with commas run several. What the numbers mean:
`stall_s`, `slowdown` in rows.py, floors in floors.py, the order of events in job.py.

    durable_s           from the call until it is fsynced, with nothing else going on
    durable_training_s  the same while training goes on
    restore_cold_s      into a model that was just built, as in a new process: the files' caches
                        are dropped, and memory that was freed is given back
    restore_memory_s    the same, from memory that outlives the process
    gpu_save_bytes      peak of torch's GPU memory in windows with a save, less that in windows
                        without; none on a CPU
    host_save_bytes     host memory that a turn takes at most: pinned, shared, of any process
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.compare.rows import medians, row, table
from benchmarks.compare.systems import DEFAULT, ROOMS
from benchmarks.machine import words

if TYPE_CHECKING:
    from benchmarks.compare.job import Job

OFF_CPU, BUSY = "off-cpu", "busy"


def main() -> None:
    arguments = parsed()
    if arguments.inside:
        inside(arguments)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="trainckpt-compare-", dir=arguments.folder) as folder:
        for ranks in arguments.ranks:
            for gigabytes in arguments.gigabytes:
                for compute in arguments.compute:
                    rows += job_rows(arguments, ranks, gigabytes, compute, Path(folder))
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.png:
        from benchmarks.compare.plot import draw

        draw(rows, arguments.png)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="a picture too; needs matplotlib")
    parser.add_argument("--ranks", type=listed(int), default=[2])
    parser.add_argument("--gigabytes", type=listed(float), default=[1.2])
    parser.add_argument("--compute", type=listed(str), default=[BUSY])
    parser.add_argument("--systems", type=listed(str), default=list(DEFAULT))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of windows in each round")
    parser.add_argument("--window", type=int, default=10, help="steps of a window")
    parser.add_argument("--step-seconds", type=float, help="of a step off the CPU")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a busy step")
    parser.add_argument("--no-restore", action="store_true", help="measure saves alone")
    parser.add_argument("--limit-s", type=float, help="of a job; rows of what it has by then")
    parser.add_argument("--threads", type=int, help="of each rank; the cores are shared out")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where saves go")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.systems:
        if name not in ROOMS:
            parser.error(f"no system {name!r}; there are {', '.join(ROOMS)}")
    for compute in arguments.compute:
        if compute not in (BUSY, OFF_CPU):
            parser.error(f"--compute is {BUSY} or {OFF_CPU}, not {compute!r}")
    return arguments


def versions() -> str:
    """Of what takes part, as far as it is installed."""
    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "torchsnapshot-nightly", "torch_checkpointing"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join(found)


def listed(kind: type) -> Any:
    """A parser of values with commas between them."""
    return lambda text: [kind(part) for part in text.split(",")]


def job_rows(
    arguments: argparse.Namespace, ranks: int, gigabytes: float, compute: str, folder: Path
) -> list[dict[str, Any]]:
    """Run one job in processes of its own."""
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // ranks)
    step_s = arguments.step_seconds or 0.15 * max(1.0, gigabytes)
    given = {
        "--gigabytes": gigabytes,
        "--compute": compute,
        "--systems": ",".join(arguments.systems),
        "--rounds": arguments.rounds,
        "--pairs": arguments.pairs,
        "--window": arguments.window,
        "--step-seconds": step_s,
        "--batch": arguments.batch,
        "--threads": threads,
        "--device": arguments.device,
        "--inside": folder,
    }
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["benchmarks.compare", *(str(part) for pair in given.items() for part in pair)]
    command += ["--no-restore"] * arguments.no_restore
    try:
        subprocess.run(
            command,
            check=True,
            env=environment(ranks, threads),
            stdout=sys.stderr,
            timeout=arguments.limit_s,
        )
    except subprocess.TimeoutExpired:
        print(f"ended after {arguments.limit_s} s: rows of what was measured", file=sys.stderr)
        if not (folder / "found.json").exists():
            return []
    found = json.loads((folder / "found.json").read_text())
    job = {
        **found["job"],
        "ranks": ranks,
        "threads": threads,
        "left_out": found["left_out"],
        "machine": f"{words()}, {found['versions']}",
        "command": shlex.join(["python", "-m", "benchmarks.compare", *sys.argv[1:]]),
    }
    floors = medians(found["floors"])
    measured = {name: each for name, each in found["samples"].items() if each["plain"]}
    return [row(name, samples, floors, job) for name, samples in measured.items()]


def environment(ranks: int, threads: int) -> dict[str, str]:
    """One rank is its own world; several get theirs from torchrun.

    glibc keeps what training frees, as allocators of devices do. Left to itself it gives a step's
    gradients back to the system, or does not, and changes that in the middle of a process: more
    than what a save costs.
    """
    kept = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    found = {**kept, **os.environ, **(alone if ranks == 1 else {})}
    return {**found, "OMP_NUM_THREADS": str(threads)}


def inside(arguments: argparse.Namespace) -> None:
    """One rank of one job."""
    from benchmarks.compare.job import Job, Plan, leave, start

    device = start(arguments.device, arguments.threads)
    plan = Plan(
        arguments.gigabytes[0],
        arguments.compute[0],
        arguments.step_seconds,
        device,
        tuple(arguments.systems),
        arguments.rounds,
        arguments.pairs,
        arguments.window,
        arguments.batch,
        restores=not arguments.no_restore,
    )
    job = Job(plan, arguments.inside, partial(write_found, arguments.inside))
    job.measure()
    leave()


def write_found(folder: Path, job: Job) -> None:
    """Rank 0: replace the file with all that was measured so far."""
    if job.rank:
        return
    facts = {"bytes": job.num_bytes, "compute": job.plan.compute, "device": job.plan.device}
    found = {
        "job": {**facts, "rounds": job.plan.rounds, "window": job.plan.window},
        "floors": job.floors,
        "samples": {name: asdict(samples) for name, samples in job.samples.items()},
        "left_out": job.left_out,
        "versions": versions(),
    }
    part = folder / "found.part"
    part.write_text(json.dumps(found))
    part.replace(folder / "found.json")


if __name__ == "__main__":
    main()
