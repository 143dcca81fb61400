"""Show that two versions of trainckpt do the same.

    python -m tests.guards record OUT.json [--src FOLDER] [--once] [--only NAME ...]
    python -m tests.guards compare BEFORE.json AFTER.json
    python -m tests.guards against COMMIT [--only NAME ...]
    python -m tests.guards same-code COMMIT [--moves FILE] [--names FILE]

`record` runs each scenario twice: what differs between the two is decided by time and chance,
and is not compared (`compare --chance` lists it). `--once` leaves that to the other recording.
`against` records a commit's source and the source here, one after the other on this machine, and
compares them. `same-code` compares the source text itself, as `same_ast.py` says. The exit code
is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.guards.same_ast import same_code

ROOT = Path(__file__).resolve().parents[2]
MOST_SHOWN = 40
# leaves that may be equal by luck in the two recordings that look for chance
TIME_AND_SPACE = {"created", "free_bytes", "pids", "predicted_s", "seconds", "started"}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.guards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--src", type=Path, default=ROOT / "src")
    recording.add_argument("--once", action="store_true")
    recording.add_argument("--only", nargs="*", default=[])
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--chance", action="store_true", help="list what was not compared")
    against = commands.add_parser("against")
    against.add_argument("commit")
    against.add_argument("--only", nargs="*", default=[])
    code = commands.add_parser("same-code")
    code.add_argument("commit")
    code.add_argument("--moves", type=Path)
    code.add_argument("--names", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        times = 1 if arguments.once else 2
        return record(arguments.out, arguments.src.resolve(), arguments.only, times=times)
    if arguments.command == "compare":
        return compare(arguments.before, arguments.after, list_chance=arguments.chance)
    if arguments.command == "same-code":
        return same_code(arguments.commit, arguments.moves, arguments.names)
    return compare_with_commit(arguments.commit, arguments.only)


def record(out: Path, src: Path, only: list[str], *, times: int = 2) -> int:
    """Write the recordings of all scenarios made with the trainckpt in `src`."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(src), str(ROOT)])
    from tests.guards.record import record as record_one
    from tests.guards.scenarios import SCENARIOS

    recordings = {}
    for scenario in SCENARIOS:
        if only and scenario.name not in only:
            continue
        print(f"{scenario.name} ...", file=sys.stderr, flush=True)
        made = []
        for _ in range(times):
            with tempfile.TemporaryDirectory(prefix="scenario-") as folder:
                made.append(record_one(scenario, Path(folder)))
                if os.environ.get("SCENARIO_LOGS"):
                    print((Path(folder) / "log.txt").read_text(), file=sys.stderr)
        first, second = made[0], made[-1]
        chance = sorted(k for k in first.keys() | second.keys() if first.get(k) != second.get(k))
        recordings[scenario.name] = {"leaves": first, "chance": chance}
        out.write_text(json.dumps(recordings, indent=1, sort_keys=True) + "\n")
    return 0


def compare(before: Path, after: Path, *, list_chance: bool = False) -> int:
    """Print every difference between two files of recordings; 1 if there is any."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    failed = False
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name}: recorded {'after' if name in new else 'before'} only")
            failed = True
            continue
        then, now = old[name]["leaves"], new[name]["leaves"]
        chance = set(old[name]["chance"]) | set(new[name]["chance"])
        compared = {
            leaf
            for leaf in (then.keys() | now.keys()) - chance
            if TIME_AND_SPACE.isdisjoint(leaf.split("/"))
        }
        differences = sorted(leaf for leaf in compared if then.get(leaf) != now.get(leaf))
        print(
            f"{name}: {len(compared)} compared, {len(chance)} left to chance, "
            f"{len(differences)} differ"
        )
        for leaf in differences[:MOST_SHOWN]:
            was, value = then.get(leaf, "(nothing)"), now.get(leaf, "(nothing)")
            print(f"  {leaf}\n    was {was[:200]}\n    is  {value[:200]}")
        if list_chance:
            print("".join(f"  by chance: {leaf}\n" for leaf in sorted(chance)), end="")
        failed = failed or bool(differences)
    return int(failed)


def compare_with_commit(commit: str, only: list[str]) -> int:
    """Record the source of `commit` and the source here, and compare them."""
    with tempfile.TemporaryDirectory(prefix="scenarios-") as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        recordings = []
        for name, src, times in (
            ("before", Path(folder) / "src", []),
            ("after", ROOT / "src", ["--once"]),
        ):
            recordings.append(Path(folder) / f"{name}.json")
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tests.guards",
                    "record",
                    recordings[-1],
                    "--src",
                    src,
                    *times,
                    *(["--only", *only] if only else []),
                ],
                cwd=ROOT,
                check=True,
            )
        return compare(*recordings)


if __name__ == "__main__":
    sys.exit(main())
