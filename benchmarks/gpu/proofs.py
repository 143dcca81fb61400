"""Stage D: `trainckpt prove` of four trainings at once; every one has to be exact.

    one_rank    dropout, batch norm, fused AdamW, bf16 autocast, GradScaler, windows of 3
                micro-batches, loader with pinned memory
    two_ranks   the same under DDP, by gloo, both on one GPU
    nccl        the same under DDP, by NCCL, in a world of one
    captured    the whole step, dropout and capturable AdamW included, as a CUDA graph

The script is programs/train.py. A rehearsal has the last alone, whose step is called, not replayed;
stage F rehearses the script's other parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.findings import Findings

SCRIPT = Path(__file__).parent / "programs/train.py"
SHOWN_CHARACTERS = 1500
REHEARSED = ("captured",)


def run(findings: Findings, device: Any, folder: Path, ends: float) -> None:
    """Start all proofs, and add each verdict."""
    stops, batches = (2, 24) if device.on_card else (1, 7)
    proofs = {
        "one_rank": (None, ()),
        "two_ranks": (2, ("--backend", "gloo")),
        "nccl": (1, ("--backend", "nccl")),
        "captured": (None, ("--captured",)),
    }
    begun, running = time.monotonic(), {}
    for name, (ranks, flags) in proofs.items():
        if not device.on_card and name not in REHEARSED:
            findings.needs_card(name)
            continue
        given = ["--device", device.kind, "--micro-batches", str(batches), *flags]
        running[name] = start(folder / name, ranks, stops, given)
    for name, process in running.items():
        limit_s = max(1.0, ends - time.monotonic() - 2.0)
        with findings.attempt(name):
            out, said = process.communicate(timeout=limit_s)
            findings.add(f"{name}_seconds", time.monotonic() - begun, "s")
            verdict = json.loads(out) if out.strip() else {}
            exact, why = verdict.get("exact") is True, verdict.get("verdict") or said
            findings.add(name, exact, goal="exact", passed=exact, why=why[-SHOWN_CHARACTERS:])


def start(folder: Path, ranks: int | None, stops: int, flags: list[str]) -> subprocess.Popen[str]:
    """Start one proof."""
    folder.mkdir()
    command = [sys.executable, "-m", "trainckpt", "prove", "--json", "--stops", str(stops)]
    if ranks is not None:
        command += ["--nproc", str(ranks)]
    command += ["--keep", str(folder / "proof"), "--", str(SCRIPT), "--run", str(folder / "run")]
    return subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
