"""python -m benchmarks.exactness --framework lightning [--ranks 1,2,3] [--workers 0,2] [--json OUT]

Of all micro-batches trained after a resume: how many had the samples of the run that was never
stopped, and how many its losses to the last bit; with the framework's own checkpoints and with
trainckpt. `stops` are those that a row is the sum of, `wrong_stops` those after which the
run as a whole was another one.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.exactness.frame import STOPS, Case, judge

MEET_S = 600.0


def main():
    args = arguments()
    if args.inside:
        inside(args)
        return
    rows = [row for ranks in args.ranks for row in outside(args, ranks)]
    for row in rows:
        print(in_words(row))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


def arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness")
    parser.add_argument("--framework", required=True)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 3])
    parser.add_argument("--workers", type=numbers, default=[0, 2])
    parser.add_argument("--stops", default=",".join(STOPS))
    parser.add_argument("--systems", default="")
    parser.add_argument("--json")
    parser.add_argument("--inside", metavar="OUT", help=argparse.SUPPRESS)
    return parser.parse_args()


def numbers(text):
    return [int(part) for part in text.split(",")]


def outside(args, ranks):
    """Run all cases of so many ranks in one process tree."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable]
        if ranks > 1:
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
            ]
        command += ["-m", "benchmarks.exactness", "--framework", args.framework]
        command += ["--workers", ",".join(map(str, args.workers)), "--stops", args.stops]
        command += ["--systems", args.systems, "--inside", out]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        ranked = [json.loads((Path(out) / f"{r}.json").read_text()) for r in range(ranks)]
    return [together(args.framework, rows) for rows in zip(*ranked, strict=True)]


def together(framework, rows):
    """The rows of all ranks of one case as one."""
    counts = ("resumed", "samples_equal", "losses_equal")
    wrong = sorted({stop for row in rows for stop in row["wrong_stops"]})
    summed = {key: sum(row[key] for row in rows) for key in counts}
    return {"framework": framework, **rows[0], **summed, "wrong_stops": wrong}


def in_words(row):
    part, whole = "{} of {}".format, row["resumed"]
    return (
        f"{row['framework']:14}{row['system']:24}ranks {row['ranks']}  workers {row['workers']}  "
        f"samples {part(row['samples_equal'], whole):14}losses {part(row['losses_equal'], whole)}"
        f"  wrong after: {' '.join(row['wrong_stops']) or 'none'}"
    )


def inside(args):
    """On one rank: every case of this number of ranks."""
    import torch
    import torch.distributed as dist

    from trainckpt.ranks.store import connect
    from trainckpt.ranks.world import current_world

    module = importlib.import_module(f"benchmarks.exactness.{args.framework}")
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")

    # Over the store: gloo's threads drop the tensors of a collective when they come to it, and one
    # that does so while the interpreter ends aborts the process.
    channel, meetings = connect(current_world(), "exactness"), itertools.count()

    def meet(value):
        return channel.gather(f"meet/{next(meetings)}", value, MEET_S)[0]

    systems = args.systems.split(",") if args.systems else module.SYSTEMS
    rows = [
        judge(module.attempt, Case(system, workers, rank, ranks), args.stops.split(","), meet)
        for system in systems
        for workers in args.workers
    ]
    (Path(args.inside) / f"{rank}.json").write_text(json.dumps(rows))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
