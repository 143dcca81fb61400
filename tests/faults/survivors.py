"""Cases of ranks that die: python -m tests.faults.survivors --cases 30 --seed 1

Each trains on four hosts without saving anything, kills or stops one rank at a random instant, or
two, lets the others save and leave, goes on with all four, and is compared with the run that lost
nobody. A rank that was stopped may wake when the others have left, or when the run has gone on.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults import farm, replicated_training
from tests.faults.lost_hosts import noted, sealing
from tests.limits import HANG_S

SIZE, EPOCHS, LOST_AT = 4, 8, 4
ITEMS = SIZE * replicated_training.BATCH * replicated_training.STEPS_AN_EPOCH
EXACT, MARKED = "this resume is bitwise in ", ": same data, not bitwise: ranks that died\n"


LEFT, WENT_ON = "when the others have left", "when the run has gone on"


@dataclass(frozen=True)
class Case:
    """Who dies, how and when; whether partners keep what is its own; whether it is encrypted; when
    it wakes again; and whether the second one dies later, while it saves with the others.
    """

    partners: bool
    lost: tuple[int, ...]
    stops: bool = False
    delay_s: float = 0.0
    sealed: bool = False
    wakes: str = ""
    in_turn: bool = False

    @property
    def is_exact(self):
        """Whether there is a partner left of each that is lost."""
        return self.partners and not any((rank + 1) % SIZE in self.lost for rank in self.lost)


@dataclass(frozen=True)
class Result:
    """Steps: the last one that was trained, and where the run went on; the log."""

    done: int
    began: int
    log: str


def drawn(seed, *, partners, two=False):
    """A case."""
    dice = random.Random(seed)
    lost, stops = (dice.randrange(SIZE),), dice.random() < 0.3
    case = Case(partners, lost, stops, dice.uniform(0, 0.6))
    wakes = dice.choice(["", LEFT, WENT_ON]) if stops else ""
    if two:
        lost = tuple(sorted(dice.sample(range(SIZE), 2)))
    return replace(case, lost=lost, wakes=wakes)


def straight(hosts, folder):
    """What each rank noted at each step of the run that lost nobody."""
    marks, log = folder / "marks", folder / "log"
    hosts.start(
        range(SIZE),
        replicated_training.train_on_data,
        folder / "run",
        EPOCHS,
        marks,
        log=log,
        TRAINCKPT_EVERY="never",
    )
    assert hosts.ends() == [0] * SIZE, log.read_text()
    return noted(marks)


def play(hosts, case, folder, expected):
    """Train, let one rank die, go on."""
    marks, log = folder / "marks", folder / "log"
    environment = {
        "TRAINCKPT_EVERY": "never",
        "TRAINCKPT_SURVIVORS": "8 s",
        "TRAINCKPT_REDUNDANCY": "partner" if case.partners else "none",
        "TEST_STEP_S": "0.03",
    }
    keys = sealing(folder) if case.sealed else {}
    ranks = hosts.start(
        range(SIZE),
        replicated_training.train_on_data,
        folder / "run",
        EPOCHS,
        marks,
        log=log,
        **environment,
        **keys,
    )
    until_s = time.monotonic() + HANG_S
    while not marks.is_dir() or last_step(noted(marks)) < LOST_AT:
        assert hosts.all_run, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.01)
    time.sleep(case.delay_s)
    if case.in_turn:
        die_in_turn(ranks, case.lost, folder / "run" / "survivors" / "1")
    for rank in () if case.in_turn else case.lost:
        os.kill(ranks[rank], signal.SIGSTOP if case.stops else signal.SIGKILL)
    codes = hosts.ends_but(case.lost)
    assert all(code not in (0, None) for code in codes), (codes, log.read_text())
    asleep = [ranks[rank] for rank in case.lost] if case.wakes else []
    if case.wakes == LEFT:
        wake(hosts, asleep, folder)
    elif not asleep:
        hosts.kill()
    before = noted(marks)
    done = last_step(before)
    assert done < len(steps(expected[0])), "it went on to its end"
    again = folder / "again"
    hosts.start(
        range(SIZE),
        replicated_training.train_on_data,
        folder / "run",
        EPOCHS,
        again,
        log=log,
        TRAINCKPT_EVERY="never",
        **keys,
    )
    assert hosts.ends() == [0] * SIZE, log.read_text()
    if case.wakes == WENT_ON:
        wake(hosts, asleep, folder)
    assert (EXACT if case.is_exact else MARKED) in log.read_text(), log.read_text()
    assert not any((folder / "run" / "survivors").iterdir()), "they are needed no more"
    after = noted(again)
    (began,) = {facts["began"]["step"] for facts in after.values()}
    each_sample_once(before, after, began, expected)
    if case.is_exact:
        assert all(steps(facts)[-1] >= began for facts in before.values()), (before, began)
        same(before, expected)
        same(after, expected)
    return Result(done, began, log.read_text())


def die_in_turn(ranks, lost, reports):
    """The second dies once it has reported; until then the partner of the first sleeps, so that
    nothing can be decided.
    """
    first, second = lost
    os.kill(ranks[first], signal.SIGKILL)
    os.kill(ranks[first + 1], signal.SIGSTOP)
    until_s = time.monotonic() + HANG_S
    while not (reports / f"{second}.json").exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    os.kill(ranks[second], signal.SIGKILL)
    os.kill(ranks[first + 1], signal.SIGCONT)


def wake(hosts, asleep, folder):
    """It finds that it was taken for dead, and leaves; what there is stays as it is."""
    before = written(folder / "run" / "snapshots")
    for rank in asleep:
        os.kill(rank, signal.SIGCONT)
    assert 0 not in [hosts.end(rank) for rank in asleep]
    assert written(folder / "run" / "snapshots") == before


def written(folder):
    """Path -> bytes of all files."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def last_step(facts):
    return max((step for of_rank in facts.values() for step in steps(of_rank)), default=0)


def steps(facts):
    return sorted(int(step) for step in facts if step.isdecimal())


def same(facts, expected):
    """State, generators and samples after every step are those of the straight run."""
    for rank, of_rank in facts.items():
        for step in steps(of_rank):
            for what in ("state", "generator", "samples"):
                assert of_rank[str(step)][what] == expected[rank][str(step)][what], (rank, step)


def each_sample_once(before, after, began, expected):
    """In every epoch, of what counts: steps up to where it went on, and those after it."""
    seen = collections.defaultdict(collections.Counter)
    counts = [after[rank][str(step)] for rank in after for step in steps(after[rank])]
    for rank, facts in expected.items():  # the lost rank may have died before it noted its last
        trained = map(str, range(1, began + 1))
        counts += [before.get(rank, facts).get(step, facts[step]) for step in trained]
    for facts in counts:
        seen[facts["epoch"]].update(facts["samples"])
    assert len(seen) == EPOCHS
    for epoch, found in sorted(seen.items()):
        twice = found - collections.Counter(range(ITEMS))
        never = collections.Counter(range(ITEMS)) - found
        assert found == collections.Counter(range(ITEMS)), (epoch, began, twice, never)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-partners", action="store_true")
    parser.add_argument("--two", action="store_true", help="die at once")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no case after so long")
    options = parser.parse_args()
    begun_s, lost = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with farm.farm(folder / "own", SIZE) as hosts:
            expected = straight(hosts, folder)
            for seed in range(options.seed, options.seed + options.cases):
                if time.monotonic() - begun_s > options.limit_s:
                    break
                case = drawn(seed, partners=not options.without_partners, two=options.two)
                inside = folder / str(seed)
                inside.mkdir()
                found = play(hosts, case, inside, expected)
                lost.append(found.done - found.began)
                print(seed, case, f"trained {found.done}, went on at {found.began}", flush=True)
    print(f"{len(lost)} cases; steps lost: {sorted(lost)}")
    return int(max(lost, default=0) > 1)


if __name__ == "__main__":
    sys.exit(main())
