"""What encryption costs: saves of one state, encrypted and not, in turn.

One process, with two runs of the same model and optimizer, which differ in `encrypt_to` alone. Each
round takes one save of each, in alternating order. Training is one rank of one thread whose steps
wait, as they would for a GPU: that, on a machine of two cores, is what a free core means here.
`stall_s` is how much longer the window with the save took than the median of those without;
`durable_s` is from the call to the commit, fsynced. Then a resume of each, files not in the page
cache and nothing in shared memory: `restore_s`.

    python -m benchmarks.encryption --json benchmarks/results/encryption.json

Targets: nothing added to the stall, at most 15 % to `durable_s`, by medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from trainckpt import Checkpointer
from trainckpt.encryption import keys

STEP_S = 0.02
STEPS = 10  # of a window
LEAST = 5  # rounds that are measured
KINDS = ("plain", "encrypted")


class Parts:
    """Matrices of 16 MB, as many as it takes, and momentum of each."""

    def __init__(self, gigabytes):
        torch.manual_seed(0)
        number = max(1, round(gigabytes * 1e9 / 2 / (4 * 2048 * 2048)))
        self.model = nn.ParameterList(
            [nn.Parameter(torch.randn(2048, 2048)) for _ in range(number)]
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()  # makes the momentum
        for parameter in self.model.parameters():
            parameter.grad = None

    def change(self):
        """All of it, or the next save would refer to this one."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1e-3)
                self.optimizer.state[parameter]["momentum_buffer"].add_(1e-3)


def window(ckpt, optimizer, save):
    """Seconds of some steps, at whose first boundary a save is taken; and until that is durable."""
    durable, waiting, begun = [], None, time.perf_counter()

    def wait(pending):
        pending.wait("local")
        durable.append(time.perf_counter() - begun)

    for step in range(STEPS):
        if save and step == 0:
            waiting = threading.Thread(target=wait, args=(ckpt.save(),))
            waiting.start()
        ckpt.boundary()
        time.sleep(STEP_S)
        optimizer.step()  # changes nothing without gradients; what is copied beside waits for it
    took = time.perf_counter() - begun
    if waiting is not None:
        waiting.join()
    return took, durable


def one_save(ckpt, parts):
    """Stall and durable_s of one save, with windows without one beside it."""
    parts.change()
    without = [window(ckpt, parts.optimizer, save=False)[0] for _ in range(2)]
    took, durable = window(ckpt, parts.optimizer, save=True)
    return took - statistics.median(without), durable[0]


def drop_from_cache(folder):
    for path in Path(folder).rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resume(place, gigabytes, options):
    """Seconds of a resume from disk alone."""
    os.environ["TRAINCKPT_MEMORY"] = "none"
    drop_from_cache(place)
    parts = Parts(gigabytes)
    ckpt = Checkpointer(place, model=parts.model, optimizer=parts.optimizer, **options)
    begun = time.perf_counter()
    ckpt.resume()
    took = time.perf_counter() - begun
    ckpt.__exit__(SystemExit, SystemExit(75), None)
    del os.environ["TRAINCKPT_MEMORY"]
    return took


def measure(arguments, folder):
    """Rows of each kind."""
    identity = keys.generate()
    keys.write_identity(folder / "id", identity)
    own = {"plain": {}, "encrypted": {"encrypt_to": identity.recipient}}
    common = {"every": "never", "keep_last": 1}
    parts = Parts(arguments.gigabytes)
    objects = {"model": parts.model, "optimizer": parts.optimizer}
    runs = {k: Checkpointer(folder / k, **objects, **common, **own[k]) for k in KINDS}
    found = {kind: {"stall_s": [], "durable_s": [], "restore_s": []} for kind in KINDS}
    for ckpt in runs.values():
        ckpt.resume()
    begun = time.perf_counter()
    for number in range(arguments.warm_up + arguments.rounds):
        if number >= arguments.warm_up + LEAST and time.perf_counter() - begun > arguments.limit_s:
            break
        for kind in KINDS if number % 2 else reversed(KINDS):
            stall, durable = one_save(runs[kind], parts)
            if number >= arguments.warm_up:
                found[kind]["stall_s"].append(stall)
                found[kind]["durable_s"].append(durable)
    for ckpt in runs.values():
        ckpt.__exit__(SystemExit, SystemExit(75), None)
    for number in range(arguments.resumes):
        for kind in KINDS if number % 2 else reversed(KINDS):
            options = {**own[kind], "identity": str(folder / "id"), **common}
            found[kind]["restore_s"].append(resume(folder / kind, arguments.gigabytes, options))
    return found


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--resumes", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=1e9, help="no more rounds after so long")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments, Path(folder))
    rows = [
        {
            "kind": kind,
            "gigabytes": arguments.gigabytes,
            "rounds": len(of_kind["durable_s"]),
            **{name: statistics.median(values) for name, values in of_kind.items() if values},
            "samples": of_kind,
        }
        for kind, of_kind in found.items()
    ]
    for row in rows:
        print(
            {
                k: round(v, 4) if isinstance(v, float) else v
                for k, v in row.items()
                if k != "samples"
            }
        )
    plain, sealed = rows
    ratios = {
        "durable_ratio": sealed["durable_s"] / plain["durable_s"],
        "stall_added_s": sealed["stall_s"] - plain["stall_s"],
        "restore_ratio": sealed["restore_s"] / plain["restore_s"],
    }
    print({name: round(value, 3) for name, value in ratios.items()})
    if arguments.json:
        machine = {
            "cores": os.cpu_count(),
            "ranks": 1,
            "compute_threads": 1,
            "steps": f"wait {STEP_S} s each",
            "machine": platform.machine(),
            "torch": torch.__version__,
        }
        Path(arguments.json).write_text(
            json.dumps({"machine": machine, **ratios, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
