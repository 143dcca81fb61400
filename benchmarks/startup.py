"""Launch to first micro-batch: a resume beside a fresh start of the same script.

Pairs of launches take turns, the fresh one now first, now second. Before each, the page cache
forgets what was saved, and shared memory is emptied. `extra_s` is the median of the differences.
All the while free memory is kept for the machine, too: what a virtual machine has given back to
its host it gets at 3 s per GB, and a resume needs a little more than a fresh start, so that this
would be most of what is measured. That memory comes in pages of 4 KiB alone, whatever the system
would give. `--memory as-found` leaves it as it is.

`--caches all` has the page cache forget everything else, too, as on a machine that was just
started: it takes root. The launch reads its modules from the disk then, which a resume shares.

    trainckpt  `trainckpt run`, the script with a Checkpointer
    dcp        `torchrun`, the script with torch.distributed.checkpoint's load

A launch begins with the command and ends when the last rank has done its first step.

    python -m benchmarks.startup --json benchmarks/results/startup.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.compare.training import Training

SYSTEMS = ("trainckpt", "dcp")
FRESH, RESUME, PREPARE = "fresh", "resume", "prepare"
HAD, AS_FOUND = "had", "as-found"
SAVED, ALL = "saved", "all"
LIMIT_S = 600.0


# ---- the script


def job(given: argparse.Namespace) -> None:
    """What is launched: build, resume if asked to, one step, note when; then be gone."""
    if given.job == "trainckpt":
        import trainckpt  # as early as a script would
    import torch
    from benchmarks.compare import job as compare
    from benchmarks.compare.training import Training

    device = compare.start("cpu", given.threads)
    training = Training(given.gigabytes, "busy", 0.0, device, fresh=True)
    if given.job == "dcp":
        with_dcp(training, given)
    else:
        options = {"model": training.model, "optimizer": training.optimizer}
        ckpt = trainckpt.Checkpointer(None, every="never", **options)
        ckpt.resume()
        ckpt.boundary()
        if (ckpt.resumed_from is not None) != (given.how == RESUME):
            raise RuntimeError(f"{given.how}, but resumed from {ckpt.resumed_from}")
        training.step()
        if given.how == PREPARE:
            pending = ckpt.save()
            while pending.snapshot is None and pending.error is None:
                ckpt.boundary()
                time.sleep(0.001)
            pending.wait("durable")
    note = {"at": time.monotonic(), "bytes": training.num_bytes}
    place = given.marks / os.environ["RANK"]
    place.with_suffix(".tmp").write_text(json.dumps(note))
    place.with_suffix(".tmp").rename(place)
    torch.distributed.barrier()
    os._exit(0)  # nothing is saved, and no attempt finishes: the next one resumes the same


def with_dcp(training: Training, given: argparse.Namespace) -> None:
    """The same with DCP."""
    from benchmarks.compare.systems.dcp import state_of
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    if given.how == RESUME:
        state = state_of(training)
        dcp.load(state, checkpoint_id=given.place)
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    training.step()
    if given.how == PREPARE:
        dcp.save(state_of(training), checkpoint_id=given.place)


# ---- outside


class Bench:
    """Launches, and what they need."""

    def __init__(self, given: argparse.Namespace, folder: Path, memory: Path | None) -> None:
        self.given, self.folder, self.memory = given, folder, memory
        self.threads = max(1, (os.cpu_count() or 1) // given.ranks)
        self.num_bytes = 0

    def row(self, system: str) -> dict[str, Any]:
        """Interleaved pairs of one system."""
        kept = self.folder / system
        self.launch(system, PREPARE, kept)
        times: dict[str, list[float]] = {FRESH: [], RESUME: []}
        for number in range(self.given.pairs):
            for how in (FRESH, RESUME) if number % 2 else (RESUME, FRESH):
                place = kept if how == RESUME else self.folder / f"{system}-{number}"
                times[how].append(self.launch(system, how, place))
                if how == FRESH:
                    shutil.rmtree(place, ignore_errors=True)
            print(
                f"{system}: " + ", ".join(f"{h} {t[-1]:.2f} s" for h, t in times.items()),
                file=sys.stderr,
            )
        extra = [r - f for f, r in zip(times[FRESH], times[RESUME], strict=True)]
        return {
            "system": system,
            "ranks": self.given.ranks,
            "bytes": self.num_bytes,
            "memory": self.given.memory,
            "caches": self.given.caches,
            "pairs": len(extra),
            "fresh_s": round(statistics.median(times[FRESH]), 3),
            "resume_s": round(statistics.median(times[RESUME]), 3),
            "extra_s": round(statistics.median(extra), 3),
            "extra_of_each_s": [round(one, 3) for one in extra],
        }

    def launch(self, system: str, how: str, place: Path) -> float:
        """Seconds until the last rank has done its first step."""
        from benchmarks.compare.caches import evict, evict_all

        place.mkdir(exist_ok=True)
        evict(place)
        if self.given.caches == ALL:
            evict_all()
        if self.memory is not None:
            shutil.rmtree(self.memory)
            self.memory.mkdir(mode=0o700)
        marks = Path(tempfile.mkdtemp(dir=self.folder))
        begun = time.monotonic()
        done = subprocess.run(
            self.command(system, how, place, marks),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        notes = [json.loads(path.read_text()) for path in marks.glob("*[0-9]")]
        if len(notes) != self.given.ranks:
            raise RuntimeError(f"{system}, {how}: exit code {done.returncode}\n{done.stderr}")
        self.num_bytes = notes[0]["bytes"]
        return max(note["at"] for note in notes) - begun

    def command(self, system: str, how: str, place: Path, marks: Path) -> list[str]:
        """The command line of one launch."""
        nproc, python = str(self.given.ranks), [sys.executable, "-m"]
        if system == "trainckpt":
            launcher = [*python, "trainckpt.cli.main", "run", "--run", str(place), "--nproc", nproc]
        else:
            launcher = [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", nproc]
        return [
            *launcher,
            "-m",
            "benchmarks.startup",
            "--job",
            system,
            "--how",
            how,
            "--place",
            str(place),
            "--marks",
            str(marks),
            "--threads",
            str(self.threads),
            "--gigabytes",
            str(self.given.gigabytes),
        ]

    def environment(self) -> dict[str, str]:
        memory = {"TRAINCKPT_MEMORY": str(self.memory)} if self.memory else {}
        return {**os.environ, **memory, "OMP_NUM_THREADS": str(self.threads)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--memory", choices=(HAD, AS_FOUND), default=HAD)
    parser.add_argument("--caches", choices=(SAVED, ALL), default=SAVED)
    for hidden in ("--job", "--how"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--place", "--marks"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        job(given)
        return
    from benchmarks.compare.caches import memory_kept
    from benchmarks.machine import words

    needed = int((2 * given.ranks + 2) * given.gigabytes * 1e9)
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="trainckpt-startup-", dir=Path.cwd()) as folder,
        tempfile.TemporaryDirectory(
            prefix="trainckpt-startup-", dir=shared if shared.is_dir() else None
        ) as memory,
    ):
        bench = Bench(given, Path(folder), Path(memory) if shared.is_dir() else None)
        with memory_kept(needed) if given.memory == HAD else contextlib.nullcontext():
            rows = [bench.row(system) for system in given.systems.split(",")]
    for one in rows:
        print(json.dumps(one))
    if given.json:
        command = shlex.join(["python", "-m", "benchmarks.startup", *sys.argv[1:]])
        result = {"machine": words(), "command": command, "rows": rows}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
