"""One rank's shard file to disk and back, with every digest, beside the raw disk.

Rounds in turn, on the same buffers: the floors are one O_DIRECT writer with fsync and the best of
several, and O_DIRECT reads of the file into fresh memory by one thread and by several. Ours are
`write_shard` from shared memory, and `Reader.read` into fresh tensors. The file is never in the
page cache when it is read. Goals, by medians: write 1.1 x, read and verify 1.15 x the best floor.

    python -m benchmarks.local_tier --gigabytes 0.6 --json benchmarks/results/local_tier.json
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from trainckpt.format.cursor import Cursor
from trainckpt.format.layout import replicated
from trainckpt.format.manifest import Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.format.shard_file import Region
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.state.captured import Captured
from trainckpt.state.destination import Destination
from trainckpt.state.staging import stage
from trainckpt.storage.local import LocalTier

PIECE_BYTES = 8 << 20
THREADS = (1, 2, 4)


def in_pieces(num_bytes, threads, act):
    """`act(first, last)` of every piece, by so many threads."""
    pieces, lock = iter(range(0, num_bytes, PIECE_BYTES)), threading.Lock()

    def work():
        while True:
            with lock:
                at = next(pieces, None)
            if at is None:
                return
            act(at, min(at + PIECE_BYTES, num_bytes))

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def raw_write(path, memory, threads):
    """Seconds until whole pages of `memory` are on stable storage."""
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    os.posix_fallocate(descriptor, 0, len(memory))

    def write(at, end):
        while at < end:
            at += os.pwrite(descriptor, memory[at:end], at)

    in_pieces(len(memory), threads, write)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - begun


def raw_read(path, num_bytes, threads):
    """Seconds until so many bytes are in fresh memory."""
    begun = time.perf_counter()
    fresh = memoryview(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(at, end):
        while at < end:
            at += os.preadv(descriptor, [fresh[at:end]], at)

    in_pieces(num_bytes, threads, read)
    os.close(descriptor)
    return time.perf_counter() - begun


def captured_of(gigabytes):
    """A transformer's mix: some large matrices, and as many small tensors."""
    found, large = Captured(), max(int(gigabytes * 1e9 / 12 / 4), 1)
    for n in range(12):
        found.tensors[f"matrix{n}"] = torch.randn(large + n)
        for k in range(20):
            found.tensors[f"bias{n}.{k}"] = torch.randn(768 + k)
    return found


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gigabytes", type=float, default=0.6)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", default=tempfile.gettempdir())
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        row = measure(LocalTier(folder), given.gigabytes, given.rounds)
    print(json.dumps(row, indent=1))
    if given.json:
        rows = json.loads(given.json.read_text()) if given.json.exists() else []
        rows = [each for each in rows if each["gigabytes"] != row["gigabytes"]]
        given.json.write_text(json.dumps([*rows, row], indent=1) + "\n")


def measure(tier, gigabytes, rounds):
    """Medians of interleaved rounds, in seconds."""
    captured = captured_of(gigabytes)
    regions = [
        Region(n, "F32", (0,), (t.numel(),), (t.numel(),)) for n, t in captured.tensors.items()
    ]

    def memory(num_bytes):
        return memoryview(mmap.mmap(-1, num_bytes))[:num_bytes]  # shared memory

    tier.create("run.json", b"{}")
    pages = memoryview(b"")
    seconds: dict[str, list[float]] = {}
    for number in range(1, rounds + 1):
        shard = stage(captured, regions, rank=0, world=1, memory=memory)  # its head not yet known
        pages = shard.memory[: len(shard.memory) // 4096 * 4096]
        raw = tier.root / "raw"
        for threads in THREADS:
            raw.unlink(missing_ok=True)
            seconds.setdefault(f"raw_write_{threads}_s", []).append(raw_write(raw, pages, threads))
        name = SnapshotName(1, number, number, 0)
        begun = time.perf_counter()
        file = write_shard(tier, name, 0, shard)
        seconds.setdefault("write_s", []).append(time.perf_counter() - begun)
        for threads in THREADS:
            seconds.setdefault(f"raw_read_{threads}_s", []).append(
                raw_read(raw, len(pages), threads)
            )
        tensors = {r.tensor: TensorEntry("F32", r.of, replicated(1)) for r in regions}
        manifest = Manifest("run", name, None, Cursor(), 1, (file,), tensors, 0.0)
        wanted = dict.fromkeys(tensors)
        begun = time.perf_counter()
        destination = Destination(wanted)
        Reader(tier, manifest).read(wanted, destination, donor=0)
        seconds.setdefault("read_s", []).append(time.perf_counter() - begun)
        assert torch.equal(destination.finish({})["matrix3"], captured.tensors["matrix3"])
        tier.remove_folder(name.folder)
    medians = {key: round(statistics.median(values), 4) for key, values in seconds.items()}
    floor_write = min(medians[f"raw_write_{n}_s"] for n in THREADS)
    floor_read = min(medians[f"raw_read_{n}_s"] for n in THREADS)
    return {
        "gigabytes": gigabytes,
        "bytes": len(pages),
        "rounds": rounds,
        **medians,
        "write_over_one_writer": round(medians["write_s"] / medians["raw_write_1_s"], 3),
        "write_over_best": round(medians["write_s"] / floor_write, 3),
        "read_over_one_reader": round(medians["read_s"] / medians["raw_read_1_s"], 3),
        "read_over_best": round(medians["read_s"] / floor_read, 3),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "command": "python -m benchmarks.local_tier",
    }


if __name__ == "__main__":
    main()
