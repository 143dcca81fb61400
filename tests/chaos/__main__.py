"""Random runs, random faults, one verdict each.

python -m tests.chaos --budget 60m --append FILE     new seeds until the time is over
python -m tests.chaos --only SEED,...                these seeds; of one alone its folder is kept
python -m tests.chaos --budget 9m --rooms s3,hsdp    in these rooms alone
python -m tests.chaos --budget 9m --faults EIO       with these faults alone
python -m tests.chaos --table FILE                   what all lines of a file amount to

A seed stands for the same case under the same --rooms and --faults. All of it runs where no other
process of the machine is to be seen, with memory, mounts and a network of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaign import report as lines_of
from tests.campaign.__main__ import append, seconds
from tests.campaign.campaign import reference_digest
from tests.chaos import drive, judge, report, rooms
from tests.chaos.stage import stage, why_not
from trainckpt.process_dump import criu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.drive import Case
    from tests.chaos.rooms import Room
    from tests.chaos.stage import Stage

ALONE = "CHAOS_ALONE"


class Chaos:
    """Plays cases by their seeds on one stage."""

    def __init__(self, stage: Stage, references: Path) -> None:
        self.stage, self._references = stage, references

    def play(self, case: Case, *, keep: bool = False) -> tuple[dict[str, Any], str]:
        """One case: its line, and the logs of its attempts. A failure keeps its folder."""
        reference = self._reference(case.room)
        play = drive.Play(self.stage, case)
        attempts = play.run()
        verdict, why = judge.verdict(play, reference)
        line = report.line_of(case, attempts, verdict, why)
        self.stage.forget(case.room)
        if verdict != judge.FAILED and not keep:
            shutil.rmtree(play.places.folder)
            shutil.rmtree(play.places.run, ignore_errors=True)
        texts = [
            f"--- attempt {n}, {e.codes}, {e.hits}\n{e.log}" for n, e in enumerate(attempts, 1)
        ]
        return line, "\n".join(texts)

    def _reference(self, room: Room) -> Path:
        """The same run without faults, hosts or saves."""
        whole = self._references / room.reference
        if not whole.exists():
            plain = rooms.without_saves(room)
            case = drive.Case(-time.monotonic_ns(), plain, (), 0)
            play = drive.Play(self.stage, case)
            ended = play.run()[-1]
            if not ended.finished:
                raise RuntimeError(f"the reference did not finish: {plain.words}\n{ended.log}")
            self.stage.forget(plain)
            part = Path(tempfile.mkdtemp(dir=self._references, prefix="part-"))
            (play.places.folder / "trace").rename(part / "trace")
            try:
                part.rename(whole)
            except OSError:  # another campaign was sooner
                if not whole.exists():
                    raise
                shutil.rmtree(part)
            shutil.rmtree(play.places.folder)
        return whole


@contextmanager
def chaos(folder: Path, references: Path | None = None) -> Iterator[Chaos]:
    """A stage in this folder, and what plays on it."""
    kept = Path(tempfile.gettempdir()) / f"trainckpt-references-{os.getuid()}"
    place = references or kept / f"chaos-{reference_digest()}"
    place.mkdir(parents=True, exist_ok=True)
    with stage(folder) as one:
        yield Chaos(one, place)


def main() -> int:
    args = arguments()
    if args.table:
        print(report.table(lines_of.read(args.table)))
        return 0
    if ALONE not in os.environ:
        alone = str(Path(__file__).parents[1] / "alone.py")
        words = [sys.executable, "-I", "-S", alone, sys.executable, "-m", "tests.chaos"]
        return subprocess.call([*words, *sys.argv[1:]], env={**os.environ, ALONE: "1"})
    without_dumps = criu.examine().why_not if rooms.DUMPS in args.rooms else ""
    if why := why_not() or without_dumps:
        print(f"no chaos here: {why}", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="trainckpt-chaos-"))
    with chaos(folder) as playing:
        failed = (one if len(args.only) == 1 else many)(playing, args)
    if not failed and len(args.only) != 1:
        shutil.rmtree(folder)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", type=seconds, metavar="60m", help="start no new case after this time")
    add("--count", type=int, help="number of cases")
    add("--seed", type=int, help="first seed (default: after the newest one in FILE)")
    add("--append", type=Path, metavar="FILE", help="add a line a case")
    add("--rooms", type=words, default=[], metavar="NAME,...")
    add("--faults", type=words, default=[], metavar="NAME,...")
    add("--only", type=numbers, default=[], metavar="SEED,...")
    add("--table", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not (args.table or args.budget or args.count or args.only):
        parser.error("say --budget, --count, --only or --table")
    return args


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def many(playing: Chaos, args: argparse.Namespace) -> int:
    until = time.monotonic() + (args.budget or float("inf"))
    first = args.seed
    if first is None:
        known = lines_of.read(args.append) if args.append else []
        first = 1 + max((line["seed"] for line in known), default=0)
    lines = []
    for seed in args.only or itertools.islice(itertools.count(first), args.count):
        if time.monotonic() >= until:
            break
        case = drive.draw(seed, args.rooms, args.faults)
        line, logs = playing.play(case)
        line |= {k: v for k, v in (("of_rooms", args.rooms), ("of_faults", args.faults)) if v}
        lines.append(line)
        tell(line)
        if line["verdict"] == judge.FAILED:
            print("\n".join(logs.splitlines()[-60:]), file=sys.stderr, flush=True)
        if args.append:
            append(args.append, line)
    print(report.table(lines))
    return sum(line["verdict"] == judge.FAILED for line in lines)


def tell(line: dict[str, Any]) -> None:
    hits = ", ".join(f"{hit['fault']} ({hit['where']})" for hit in line["faults"]) or "no fault"
    text = f"{line['verdict']:9} seed {line['seed']}: {line['room']}; {hits}; {line['seconds']} s"
    print(text, line["codes"], line["why"], file=sys.stderr, flush=True)


def one(playing: Chaos, args: argparse.Namespace) -> int:
    case = drive.draw(args.only[0], args.rooms, args.faults)
    print(f"seed {case.seed}: {case.words}\n{case.shots}", file=sys.stderr, flush=True)
    line, logs = playing.play(case, keep=True)
    print(logs)
    tell(line)
    print(f"kept: {playing.stage.folder}", file=sys.stderr)
    return line["verdict"] == judge.FAILED


if __name__ == "__main__":
    raise SystemExit(main())
