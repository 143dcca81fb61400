"""A storm: events at random times on a run that is submitted again until it is finished.

A driver of such storms has a `Case` for each seed, a subclass of `Storm` that knows its launcher,
its nodes and what the events do, and the runs that were never stopped to compare with. What is the
same for all is here: when an event comes, how long a run may take, what was done when, and the
command line.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.elastic import trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOK_S = 0.2


class Event(Protocol):
    """What happens so many seconds after the event before, or after ranks have trained since."""

    @property
    def trains(self) -> bool: ...
    @property
    def after_s(self) -> float: ...


@dataclass(frozen=True)
class Ended:
    """How a case ended: the verdict, why, and what was done when."""

    verdict: str
    why: str
    done: tuple[str, ...]


class Storm:
    """One case as it runs.

    Subclasses have these, called in this order:

        submit      start the job; also again, by `go_on`
        go_on       submit the job again where it has ended; True: the run is finished, False: it is
                    given up, None: it runs
        happen      do what an event says
        calm        the events are over

    Args:
        place: The folder of the trace.
        trains_within_s: How long an event waits for ranks that train: the one before may have left
            nobody.
        finish_s: From the last event to the end of the run.
    """

    def __init__(self, place: Path, *, trains_within_s: float, finish_s: float) -> None:
        self._place = place
        self.trains_within_s, self.finish_s = trains_within_s, finish_s
        self.done: list[str] = []
        self._seen = 0
        self._begun_s = time.monotonic()

    def submit(self) -> None:
        raise NotImplementedError

    def go_on(self) -> bool | None:
        raise NotImplementedError

    def happen(self, event: Any) -> None:
        raise NotImplementedError

    def calm(self) -> None:
        """Nothing is left of the storm, as it is."""

    def said(self, most: int = 1_000_000) -> str:
        """The end of what the job has printed."""
        raise NotImplementedError

    def starts(self) -> list[trace.Start]:
        return trace.starts(self._place)

    def drive(self, events: Sequence[Event]) -> bool:
        """Let the events happen, and wait for the end of the run; False if it does not come."""
        self.submit()
        for event in events:
            if event.trains and self.wait_for_attempt():
                return True
            if self._wait(event.after_s):
                return True
            self.happen(event)
        self.calm()
        return self._wait(self.finish_s)

    def wait_for_attempt(self) -> bool:
        """Wait until an attempt trains that did not at the last call; True: the run is finished."""
        return self._wait(self.trains_within_s, for_attempt=True)

    def note(self, what: str, attempt: int) -> None:
        self.done.append(f"{time.monotonic() - self._begun_s:.1f} s, attempt {attempt}: {what}")

    @property
    def unfinished(self) -> str:
        return f"not finished {self.finish_s:g} s after the last event"

    def _wait(self, seconds: float, *, for_attempt: bool = False) -> bool:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if (over := self.go_on()) is not None:
                return over
            if for_attempt and (newest := self._newest_that_trained()) > self._seen:
                self._seen = newest
                return False
            time.sleep(LOOK_S)
        return False

    def _newest_that_trained(self) -> int:
        """An attempt's number; 0: none."""
        trained = [start.attempt for start in self.starts() if any(start.lines.values())]
        return max(trained, default=0)


def arguments(name: str, usage: str) -> argparse.ArgumentParser:
    """The options of every driver."""
    parser = argparse.ArgumentParser(
        f"python -m {name}", description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed-from", type=int, default=1)
    parser.add_argument("--replay", type=int, metavar="SEED")
    return parser


def run_seeds(
    args: argparse.Namespace,
    make: Callable[[int, Path], tuple[str, Any]],
    references: Callable[[Path], Any],
) -> int:
    """Run the storms of these seeds, and say how each ended; 1 if one has failed.

    Args:
        make: The words on the case of a seed, and its storm in a folder.
        references: The runs to compare with, made in a folder; a storm's `run` takes them.
    """
    folder = Path(tempfile.mkdtemp(prefix="trainckpt-storms-"))
    seeds = range(args.seed_from, args.seed_from + args.count)
    known, verdicts = references(folder), Counter[str]()
    for seed in seeds if args.replay is None else [args.replay]:
        place = folder / f"seed{seed}"
        words, storm = make(seed, place)
        print(f"seed {seed}: {words}", flush=True)
        ended = storm.run(known)
        verdicts[ended.verdict] += 1
        print(f"  {ended.verdict}: {ended.why}\n  " + "\n  ".join(ended.done), flush=True)
        if ended.verdict == trace.FAILED or args.replay is not None:
            print(storm.said(3000), flush=True)
            print(f"kept: {place}", flush=True)
        else:
            shutil.rmtree(place)
    print(", ".join(f"{name}: {verdicts[name]}" for name in sorted(verdicts)))
    if args.replay is None and not verdicts[trace.FAILED]:
        shutil.rmtree(folder)
    return 1 if verdicts[trace.FAILED] else 0
