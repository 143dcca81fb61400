"""How large a dump of the example is, by the size of its model, and whether the run stays exact.

`python -m tests.process_dump.lean --parallel none,ddp --rounds 3 --json OUT` prints a line of JSON
for each size, then by what share of the difference in state (of what the snapshot holds) the last
dump is larger than the first: at most 5 %, or it exits with 1. OUT gets all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.process_dump.example import Example, dumped_at_a_boundary
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history, catalog

SHARE = 0.05


def measure(place, size, parallel, arguments):
    """One line: a run that is dumped once, and one that is never stopped."""
    nproc = 1 if parallel == "none" else arguments.nproc
    flags = {
        "size": size,
        "parallel": parallel,
        "steps": arguments.steps,
        "batch-size": 1,
        "save-every": 1000,
        "workers": arguments.workers,
    }
    hold = place / f"{size}-hold"
    with Example(place / f"{size}-straight", nproc, flags) as straight:
        assert straight.start("--dumps", "off").wait() == 0, straight.said()
        reference = straight.trace()
    hold.touch()
    with Example(place / size, nproc, flags, HOLD=hold) as run:
        run.start()
        record = dumped_at_a_boundary(run, hold)
        said = [line for line in run.said().splitlines() if "dumped as" in line]
        hold.unlink()
        tier = open_directory(run.run)
        found = catalog.read_catalog(
            tier, attempt_history.run_id(tier), attempt_history.read_attempts(tier)
        )
        state = next(c.manifest.num_bytes for c in found if str(c.name) == record["snapshot"])
        assert run.resume().wait() == 0, run.said()
        assert f"restored {record['name']}" in run.said()
        exact = run.trace() == reference
    images = sorted(((i["num_bytes"], i["name"]) for i in record["images"]), reverse=True)
    return {
        "size": size,
        "parallel": parallel,
        "ranks": nproc,
        "workers": arguments.workers,
        "state_bytes": state,
        "dump_bytes": sum(size for size, _ in images),
        "dropped": record["dropped"],
        "exact": exact,
        "said": said,
        "largest": images[:6],
    }


def compared(parallel, arguments):
    """One round: each size, and what the last has more than the first."""
    with tempfile.TemporaryDirectory(prefix="trainckpt-lean-") as place:
        rows = []
        for size in arguments.sizes.split(","):
            rows.append(measure(Path(place), size, parallel, arguments))
            print(json.dumps(rows[-1]), flush=True)
    first, last = rows[0], rows[-1]
    more = last["dump_bytes"] - first["dump_bytes"]
    share = more / (last["state_bytes"] - first["state_bytes"])
    holds = share <= SHARE and all(row["exact"] for row in rows)
    found = {"parallel": parallel, "share": round(share, 4), "holds": holds}
    print(json.dumps(found), flush=True)
    return {**found, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", default="none", help="with commas: one after the other")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=2, help="ranks, where they are parallel")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.rounds):
        for parallel in arguments.parallel.split(","):
            found.append(compared(parallel, arguments))
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(each["holds"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
