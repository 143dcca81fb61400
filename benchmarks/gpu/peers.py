"""Stage E: a save of 4 GB beside training, of trainckpt and of its peers (`benchmarks.compare`).

Two jobs, one after the other and nothing beside them. The first has trainckpt with overlap, in long
windows and so many pairs that slowdown has an upper bound; the second trainckpt without overlap and
the peers, in short windows and few pairs. Steps really train. Saves go to this disk, or to shared
memory if the disk is slow, so that a save is written before its window is over.

    stall_*      extra time of a window with a save, seconds
    slowdown     of steps with overlap: a window with a save over one without
    gpu_memory   peak of torch's GPU memory with a save, less that without
    host_memory  host memory of a whole turn
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.facts import free_bytes

if TYPE_CHECKING:
    from benchmarks.gpu.findings import Findings

OWN, PLAIN = "trainckpt-overlap", "trainckpt-plain"
PEERS = ("torch.save", "dcp-async", "dcp")
REHEARSED_PEERS = ("torch.save",)
GIGABYTES, REHEARSED_GIGABYTES = 4.0, 0.002
STALL_S, PLAIN_STALL, SLOWDOWN, SAVE_BYTES = 0.05, 1.15, 1.01, 64e6
FAST_DISK = 2e9  # bytes/s
PROBED_BYTES = 256 << 20
LONG_BATCH, BATCH, WINDOW = 640, 256, 10  # steps of about 0.4 s and 0.15 s on an H100
SHARED_MEMORY = "/dev/shm"
OWN_SHARE, KEPT_S = 0.55, 4.0  # of the stage's time; for the figures at its end
SHOWN_CHARACTERS = 1200


def run(findings: Findings, device: Any, folder: Path, ends: float) -> None:
    """Run both jobs and judge their rows."""
    where = place(findings, device, folder)
    peers = PEERS if device.on_card else REHEARSED_PEERS
    left_s = ends - KEPT_S - time.monotonic()
    own = job(findings, device, (OWN,), where, LONG_BATCH, 5, OWN_SHARE * left_s)
    left_s = ends - KEPT_S - time.monotonic()
    others = job(findings, device, (PLAIN, *peers), where, BATCH, 2, left_s)
    rows = {row["system"]: row for row in [*own, *others]}
    for name in (OWN, PLAIN, *peers):
        row = rows.get(name)
        why = "" if row else f"left out: {left_out([*own, *others]).get(name, 'its job failed')}"
        findings.add(f"measured {name}", bool(row), goal="measured", passed=bool(row), why=why)
    with_overlap, plain = rows.get(OWN), rows.get(PLAIN)
    if with_overlap:
        findings.add("pairs", with_overlap["pairs"])
        findings.add("floor_copy", with_overlap["floor_copy_s"], "s")
        findings.at_most("stall_overlap", with_overlap["stall_s"], "s", STALL_S)
        findings.at_most("slowdown", with_overlap["slowdown"], "times", SLOWDOWN)
        findings.at_most("gpu_memory_overlap", with_overlap["gpu_save_bytes"], "bytes", SAVE_BYTES)
    if plain:
        limit = PLAIN_STALL * plain["floor_copy_s"]
        findings.at_most("stall_plain", plain["stall_s"], "s", limit)
        findings.at_most("gpu_memory_plain", plain["gpu_save_bytes"], "bytes", SAVE_BYTES)
    for name in peers:
        if with_overlap and name in rows:
            stall_s, peers_s = with_overlap["stall_s"], rows[name]["stall_s"]
            findings.at_most(f"stall beside {name}", stall_s, "s", peers_s)
    for name, row in rows.items():
        findings.add(f"host_memory {name}", row["host_save_bytes"], "bytes")
        findings.add(f"gpu_memory {name}", row["gpu_save_bytes"], "bytes")
    findings.add("rows", list(rows.values()))


def place(findings: Findings, device: Any, folder: Path) -> Path:
    """Choose where saves go: the disk, if it is fast, else shared memory."""
    rate = write_rate(folder, PROBED_BYTES if device.on_card else 1 << 20)
    findings.add("disk_write", rate, "bytes/s")
    room = 6 * GIGABYTES * 1e9
    in_memory = device.on_card and rate < FAST_DISK and free_bytes(SHARED_MEMORY) > room
    where = Path(SHARED_MEMORY) if in_memory else folder
    findings.add("saves_go_to", str(where))
    return where


def write_rate(folder: Path, num_bytes: int) -> float:
    """Return the bytes per second of a file's write and fsync."""
    path, block = folder / "probe", os.urandom(1 << 20)
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes >> 20):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    path.unlink()
    return num_bytes / seconds


def job(
    findings: Findings,
    device: Any,
    systems: tuple[str, ...],
    where: Path,
    batch: int,
    pairs: int,
    limit_s: float,
) -> list[dict[str, Any]]:
    """Run one job of benchmarks.compare, and return the rows that it has within the limit."""
    out = where / f"trainckpt-gpu-{systems[0]}-{os.getpid()}.json"
    small = {
        "--gigabytes": REHEARSED_GIGABYTES,
        "--batch": 1,
        "--pairs": 1,
        "--window": 2,
        "--threads": 1,
        "--compute": "off-cpu",
        "--step-seconds": 0.001,
    }
    given = {
        "--json": out,
        "--systems": ",".join(systems),
        "--ranks": 1,
        "--gigabytes": GIGABYTES,
        "--compute": "busy",
        "--rounds": 1,
        "--pairs": pairs,
        "--device": device.kind,
        "--batch": batch,
        "--window": WINDOW,
        "--folder": where,
        "--limit-s": f"{max(1.0, limit_s):.1f}",
        **({} if device.on_card else small),
    }
    command = [sys.executable, "-m", "benchmarks.compare", "--no-restore"]
    command += [str(word) for pair in given.items() for word in pair]
    begun = time.monotonic()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    name, why = f"seconds of {systems[0]}...", done.stdout[-SHOWN_CHARACTERS:]
    findings.add(name, time.monotonic() - begun, "s", why=why)
    rows = json.loads(out.read_text()) if out.exists() else []
    out.unlink(missing_ok=True)
    return rows


def left_out(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the systems that failed inside a job, and why."""
    return {name: why for row in rows for name, why in row["left_out"].items()}
