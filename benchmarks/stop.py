"""From SIGTERM to exit, with the snapshot fsynced, beside the raw write of the same bytes.

Each round launches a job of `--gigabytes` of state, sends SIGTERM in mid-training, waits for the
exit, and then writes as many bytes as the snapshot holds with O_DIRECT and fsync, from as many
processes as there were ranks. The goal: one micro-batch + 1.5 x the raw write + 1 s, by medians.

    python -m benchmarks.stop --json benchmarks/results/stop.json
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MICRO_BATCH_S = 0.2
BLOCK = 16 << 20
SHARE, CONSTANT_S = 1.5, 1.0


def job(run: str, gigabytes: float) -> None:
    """The training: its state is a parameter and AdamW's two moments; a step waits."""
    import torch
    import torch.distributed

    import trainckpt

    torch.set_num_threads(1)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, int(gigabytes * 1e9 / 3 / 4 / 1024), bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()  # the moments are there from now on
    optimizer.zero_grad()
    with trainckpt.Checkpointer(run, model=model, optimizer=optimizer, every="never") as ckpt:
        number = 0
        while ckpt.boundary():
            if number == 3:
                (Path(run) / f"ready{os.environ.get('RANK', '0')}").touch()
            time.sleep(MICRO_BATCH_S)
            number += 1


def launched(how: str, ranks: int, run: Path, gigabytes: float) -> list[str]:
    """The command line of one job."""
    own = ["-m", "benchmarks.stop", "--job", str(run), "--gigabytes", str(gigabytes)]
    if how == "python":
        return [sys.executable, *own]
    return [sys.executable, "-m", "trainckpt.cli.main", "run", "--nproc", str(ranks), *own]


def stopped(how: str, ranks: int, run: Path, gigabytes: float, rng: random.Random) -> float:
    """Seconds from SIGTERM to the launched process's exit."""
    run.mkdir(parents=True)
    process = subprocess.Popen(
        launched(how, ranks, run, gigabytes), stderr=subprocess.PIPE, text=True
    )
    while not all((run / f"ready{rank}").exists() for rank in range(ranks)):
        if process.poll() is not None:
            raise RuntimeError(process.communicate()[1])
        time.sleep(0.01)
    time.sleep(rng.random() * MICRO_BATCH_S)
    begun = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    log = process.communicate()[1]
    seconds = time.perf_counter() - begun
    if process.returncode != 75 or not list(run.glob("snapshots/*/manifest.json")):
        raise RuntimeError(f"exit code {process.returncode}:\n{log}")
    return seconds


def raw_write(folder: Path, num_bytes: int, writers: int) -> float:
    """Seconds to write so many bytes with O_DIRECT, fsync each file and the folder."""
    begun = time.perf_counter()
    children = []
    for writer in range(writers):
        pid = os.fork()
        if pid == 0:
            _write(folder / f"raw{writer}", num_bytes // writers)
            os._exit(0)
        children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - begun
    if any(codes):
        raise RuntimeError(f"a writer failed: {codes}")
    for writer in range(writers):
        (folder / f"raw{writer}").unlink()
    return seconds


def _write(path: Path, num_bytes: int) -> None:
    block = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT wants it
    block.write(os.urandom(1 << 20) * (BLOCK >> 20))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    for _ in range(-(-num_bytes // BLOCK)):
        os.write(descriptor, block)
    os.fsync(descriptor)
    os.close(descriptor)


def row(how: str, ranks: int, gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians of interleaved rounds."""
    rng, stops, writes, num_bytes = random.Random(0), [], [], 0
    for number in range(rounds):
        run = folder / f"{how}{ranks}-{number}"
        stops.append(stopped(how, ranks, run, gigabytes, rng))
        shards = list(run.glob("snapshots/*/*.safetensors"))
        num_bytes = sum(shard.stat().st_size for shard in shards)
        shutil.rmtree(run)
        writes.append(raw_write(folder, num_bytes, ranks))
        print(f"{how}, {ranks} ranks: {stops[-1]:.2f} s, raw write {writes[-1]:.2f} s", flush=True)
    stop_s, raw_s = statistics.median(stops), statistics.median(writes)
    allowed_s = MICRO_BATCH_S + SHARE * raw_s + CONSTANT_S
    return {
        "launcher": how,
        "ranks": ranks,
        "bytes": num_bytes,
        "rounds": rounds,
        "micro_batch_s": MICRO_BATCH_S,
        "sigterm_to_exit_s": round(stop_s, 3),
        "raw_write_s": round(raw_s, 3),
        "allowed_s": round(allowed_s, 3),
        "met": stop_s <= allowed_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", metavar="RUN", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job(arguments.job, arguments.gigabytes)
        return
    with tempfile.TemporaryDirectory(prefix="trainckpt-stop-", dir=Path.cwd()) as folder:
        rows = [
            row(how, ranks, arguments.gigabytes, arguments.rounds, Path(folder))
            for how, ranks in (("python", 1), ("trainckpt run", 2))
        ]
    for one in rows:
        print(json.dumps(one))
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
