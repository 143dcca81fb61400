"""What `survivors` costs: steps of real DDP ranks with it and without, in turn.

    python -m benchmarks.small_state --json benchmarks/results/small_state.json

    off        survivors="never": what the others are compared with
    alone      survivors without partners: each moment is noted, nothing is sent or copied
    partners   each rank's own state goes to its partner at every step, shares of tensors are copied

Nothing is saved meanwhile. Each round runs some steps of each kind, in alternating order, each as
an attempt of its own in the same processes; a step is one micro-batch, all of it: boundary,
forward, backward with its all-reduce over gloo, and AdamW. Computing is one thread a rank; a wait
of `--wait-s` in each step stands for the work of a device. `slowdown` is the median over rounds of
the ratio of mean step times, `slowdown_upper95` that median's upper bound; `bytes` are of one rank
and step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.compare.rows import upper95
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainckpt import Checkpointer

KINDS = {
    "off": {"survivors": "never"},
    "alone": {"survivors": "30 s", "redundancy": "none"},
    "partners": {"survivors": "30 s", "redundancy": "partner"},
}
WARM_UP = 5  # steps of each attempt that are not measured: first moments, first copies
WIDTH = 1024


def steps_of(place, kind, parts, arguments):
    """Mean seconds of a step of one attempt, and what is kept of each."""
    model, optimizer = parts
    loader = DataLoader(TensorDataset(torch.ones(arguments.steps * 2, WIDTH)), batch_size=2)
    ckpt = Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="never", **KINDS[kind]
    )
    ckpt.resume()
    took, begun, kept = [], None, None
    for _ in ckpt.epochs(1):
        for (batch,) in ckpt.batches():
            now = time.perf_counter()
            if begun is not None:
                took.append(now - begun)
            begun = now
            if len(took) == WARM_UP:
                kept = bytes_of(ckpt)
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            time.sleep(arguments.wait_s)
            loss.backward()
            optimizer.step()
    ckpt.__exit__(SystemExit, SystemExit(75), None)
    return statistics.fmean(took[WARM_UP:]), kept


def bytes_of(ckpt):
    """Sent to the partner, and copied, at each step."""
    survival = ckpt._attempt.survival
    if survival is None:
        return {"sent": 0, "copied": 0}
    moments = survival._moments
    assert not moments.why_off, moments.why_off
    if moments._small is None:
        return {"sent": 0, "copied": 0}
    copied = sum(region.num_bytes for region in moments._own_shares(moments.alike))
    return {"sent": len(moments._held[-1].small.memory), "copied": copied}


def rank_main(arguments):
    """What each rank runs; rank 0 writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = round(arguments.gigabytes * 1e9 / 12 / WIDTH / WIDTH)  # parameters and two moments
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    )
    parts = model, torch.optim.AdamW(model.parameters())
    found = {kind: {"step_s": [], "bytes": None} for kind in KINDS}
    for number in range(arguments.rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            place = Path(arguments.folder) / f"{number}-{kind}"
            seconds, kept = steps_of(place, kind, parts, arguments)
            found[kind]["step_s"].append(seconds)
            found[kind]["bytes"] = kept
    if dist.get_rank() == 0:
        Path(arguments.folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    dist.destroy_process_group()


def rows_of(found, arguments):
    """One of each kind."""
    rows = []
    for kind, of_kind in found.items():
        ratios = [a / b for a, b in zip(of_kind["step_s"], found["off"]["step_s"], strict=True)]
        rows.append(
            {
                "kind": kind,
                "rounds": len(ratios),
                "bytes": of_kind["bytes"],
                "step_s": statistics.median(of_kind["step_s"]),
                "slowdown": statistics.median(ratios),
                "slowdown_upper95": upper95(ratios),
                "samples": of_kind["step_s"],
            }
        )
        print(
            {
                k: round(v, 4) if isinstance(v, float) else v
                for k, v in rows[-1].items()
                if k != "samples"
            }
        )
    machine = {
        "cores": os.cpu_count(),
        "ranks": arguments.ranks,
        "hosts": 1,
        "compute_threads": 1,
        "wait_s": arguments.wait_s,
        "gigabytes": arguments.gigabytes,
        "steps": arguments.steps,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    return {"machine": machine, "rows": rows}


def main():
    """Start the ranks, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=0.15)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--wait-s", type=float, default=0.1)
    parser.add_argument("--json", default=None)
    parser.add_argument("--folder", default=None, help="of the ranks; not to be given")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        rank_main(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(arguments.ranks),
                "-m",
                "benchmarks.small_state",
                *sys.argv[1:],
                "--folder",
                folder,
            ],
            check=True,
        )
        found = json.loads(Path(folder, "found.json").read_text())
    result = rows_of(found, arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
