"""The campaign's command line.

python -m tests.campaign --budget 8m --append FILE   new seeds until the time is over
python -m tests.campaign --count 24 --seed-from 1    these seeds
python -m tests.campaign --replay 17                 one seed, its folder kept, its logs shown
python -m tests.campaign --family one-rank ...       `trainckpt run`, SIGTERM to one of its ranks
python -m tests.campaign --family layouts ...        FSDP, HSDP, tensor parallel on 1 to 4 ranks
python -m tests.campaign --family reshard ...        stopped in one layout, continued in another
python -m tests.campaign --summary FILE              what all lines of a file amount to
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from pathlib import Path

from tests.campaign import families, report
from tests.campaign.campaign import campaign


def main() -> int:
    args = arguments()
    if args.summary:
        print(report.summary(report.read(args.summary)))
        return 0
    if args.replay is not None:
        return replay(args)
    failed = run_many(args)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", type=seconds, metavar="8m", help="start no new case after this time")
    add("--count", type=int, help="number of cases")
    add("--seed-from", type=int, help="first seed (default: after the newest one in FILE)")
    add("--append", type=Path, metavar="FILE", help="add a line a case; at the end, all of it")
    add("--family", choices=families.FAMILIES, default=families.RANDOM, help="(%(default)s)")
    add("--replay", type=int, metavar="SEED")
    add("--summary", type=Path, metavar="FILE")
    add("--keep", type=Path, metavar="DIR", help="work here, and keep every case's folder")
    args = parser.parse_args()
    if not (args.summary or args.budget or args.count or args.replay is not None):
        parser.error("say --budget, --count, --replay or --summary")
    return args


def seconds(text: str) -> float:
    """Seconds in "8m", "90s", "1h" or "90"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: 90s, 8m, 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def run_many(args: argparse.Namespace) -> int:
    until = time.monotonic() + (args.budget or float("inf"))
    known = report.read(args.append) if args.append else []
    first = args.seed_from
    if first is None:
        seeds = [line["seed"] for line in known if families.of(line) == args.family]
        first = 1 + max(seeds, default=0)
    lines = []
    with campaign(args.keep) as running:
        for seed in itertools.islice(itertools.count(first), args.count):
            if time.monotonic() >= until:
                break
            line, logs = running.run(seed, keep=args.keep is not None, family=args.family)
            lines.append(line)
            progress(line, logs, running.folder)
            if args.append:
                append(args.append, line)
    print(report.summary([*known, *lines]))
    return sum(not line["ok"] for line in lines)


def append(file: Path, line: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def progress(line: dict, logs: str, folder: Path) -> None:
    family = families.of(line)
    say = line.get("chain") or families.draw(family, line["seed"]).settings.words
    hits = ", ".join(f"{s['signal']} {s['category']} {s['ended']}" for s in line["stops"]) or "none"
    mark = "ok    " if line["ok"] else "FAILED"
    text = f"{mark} seed {line['seed']}: {say}; {line['launcher']}; {hits}; {line['seconds']} s"
    print(text, file=sys.stderr, flush=True)
    if not line["ok"]:
        print(f"  {line['why']}\n  kept: {folder}/{family}-seed{line['seed']}", file=sys.stderr)
        print("\n".join(logs.splitlines()[-40:]), file=sys.stderr, flush=True)


def replay(args: argparse.Namespace) -> int:
    seed, family = args.replay, args.family
    print(f"seed {seed}: {families.draw(family, seed).words}", file=sys.stderr)
    with campaign(args.keep) as running:
        line, logs = running.run(seed, keep=True, family=family)
        print(logs)
        print(json.dumps(line, indent=1))
        print(f"kept: {running.folder}/{family}-seed{seed}", file=sys.stderr)
    return 0 if line["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
