"""Cases of lost hosts: python -m tests.faults.lost_hosts --cases 60 --seed 1

Each trains on four hosts that save to memory at every step, loses one or two of them at a random
instant, goes on on replacements or on what is left, and is compared with the run that lost nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults import farm, replicated_training
from tests.limits import HANG_S
from trainckpt.encryption import keys as keys_of
from trainckpt.format.names import SnapshotName

SIZE, LAST, LOST_AT = 4, 100, 4
SAVING = {"TRAINCKPT_EVERY": "never", "TRAINCKPT_MEMORY_EVERY": "1 step"}
WAYS = {"partner": 1, "xor:4": 1, "rs:2+2": 2}  # how many hosts may be lost


@dataclass(frozen=True)
class Case:
    """What is lost, when, on which hosts the run goes on, and whether it is encrypted; on which
    hosts the manifest in memory is damaged.
    """

    redundancy: str
    lost: tuple[int, ...]
    replaced: bool = True
    delay_s: float = 0.0
    every: str = "never"
    sealed: bool = False
    spoiled: tuple[int, ...] = ()

    @property
    def numbers(self):
        return [n for n in range(SIZE) if self.replaced or n not in self.lost]


@dataclass(frozen=True)
class Result:
    """Steps: the newest known to be kept, the last one trained, where the run went on; the log."""

    kept: int
    done: int
    began: int
    log: str


def drawn(seed):
    """A case."""
    dice = random.Random(seed)
    redundancy = dice.choice(sorted(WAYS))
    lost = tuple(sorted(dice.sample(range(SIZE), WAYS[redundancy])))
    return Case(redundancy, lost, dice.random() < 0.7, dice.uniform(0, 0.6))


def straight(hosts, folder):
    """What each rank noted at each step of the run that lost nothing."""
    marks, log = folder / "marks", folder / "log"
    hosts.start(
        range(SIZE),
        replicated_training.train,
        folder / "run",
        LAST,
        marks,
        log=log,
        TRAINCKPT_EVERY="never",
    )
    assert hosts.ends() == [0] * SIZE, log.read_text()
    return noted(marks)


def noted(marks):
    """Rank -> step, or "began" -> what was noted."""
    return {
        int(rank.name): {
            path.name: json.loads(path.read_text())
            for path in rank.iterdir()
            if not path.name.startswith(".")
        }
        for rank in marks.iterdir()
    }


def sealing(folder):
    """Variables of a run that is encrypted, and of whoever may go on with it."""
    identity = keys_of.generate()
    keys_of.write_identity(folder / "identity", identity)
    return {
        "TRAINCKPT_ENCRYPT_TO": identity.recipient,
        "TRAINCKPT_IDENTITY": str(folder / "identity"),
    }


def play(hosts, case, folder, expected):
    """Train, lose, go on; every step compared with the straight run."""
    marks, log = folder / "marks", folder / "log"
    keys = sealing(folder) if case.sealed else {}
    environment = {
        "TEST_STEP_S": "0",
        **SAVING,
        **keys,
        "TRAINCKPT_EVERY": case.every,
        "TRAINCKPT_REDUNDANCY": case.redundancy,
    }
    hosts.start(
        range(SIZE), replicated_training.train, folder / "run", LAST, marks, log=log, **environment
    )
    until_s = time.monotonic() + HANG_S
    while not marks.is_dir() or newest(noted(marks)) < LOST_AT:
        assert hosts.all_run, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.01)
    time.sleep(case.delay_s)
    for number in case.lost:
        hosts.lose(number)
    hosts.kill()
    before = noted(marks)
    same(before, expected)
    done = max(steps(before[rank])[-1] for rank in before)
    assert done < LAST, "it went on to its end"
    for number in case.lost:
        hosts.boot(number)
    for number in case.spoiled:
        spoil_manifests(hosts, number)
    again, until = folder / "again", min(done + 3, LAST)
    hosts.start(
        case.numbers,
        replicated_training.train,
        folder / "run",
        until,
        again,
        log=log,
        TRAINCKPT_EVERY="never",
        **keys,
    )
    assert hosts.ends() == [0] * len(case.numbers), log.read_text()
    after = noted(again)
    (began,) = {facts["began"]["step"] for facts in after.values()}
    if len(case.numbers) == SIZE:
        same(after, expected)
        assert all(steps(facts) == [*range(began + 1, until + 1)] for facts in after.values())
    for rank, facts in after.items():
        begun_as = expected[rank][str(began)]["state"] if began else None
        assert begun_as in (facts["began"]["state"], None), (rank, began)
    return Result(newest(before), done, began, log.read_text())


def spoil_manifests(hosts, number):
    """One bit of each manifest in the memory of this host is another one."""
    memory = Path(f"/proc/{hosts.holder(number)}/root") / str(hosts.own).lstrip("/")
    files = list(memory.glob("trainckpt-*/*/snapshots/*/manifest.json"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def newest(facts):
    """Step of the newest snapshot that any rank knew to be kept."""
    texts = [each["kept"] for of_rank in facts.values() for each in of_rank.values()]
    return max((name.step for name in map(SnapshotName.parse, texts) if name), default=0)


def steps(facts):
    return sorted(int(step) for step in facts if step.isdecimal())


def same(facts, expected):
    """Parameters, moments and generators after every step are those of the straight run."""
    for rank, of_rank in facts.items():
        for step in steps(of_rank):
            for what in ("state", "generator"):
                assert of_rank[str(step)][what] == expected[rank][str(step)][what], (rank, step)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-s", default="0", help="how long each step lasts at least")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no case after so long")
    options = parser.parse_args()
    begun_s, lost = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with farm.farm(folder / "own", SIZE) as hosts:
            expected = straight(hosts, folder)
            SAVING["TEST_STEP_S"] = options.step_s
            for seed in range(options.seed, options.seed + options.cases):
                if time.monotonic() - begun_s > options.limit_s:
                    break
                case = drawn(seed)
                inside = folder / str(seed)
                inside.mkdir()
                found = play(hosts, case, inside, expected)
                lost.append(found.done - found.began)
                assert found.kept <= found.began, (case, found.log)
                print(
                    seed,
                    case,
                    f"kept {found.kept}, trained {found.done}, went on at {found.began}",
                    flush=True,
                )
    print(f"{len(lost)} cases; steps lost: {sorted(lost)}")
    return int(max(lost, default=0) > 1)


if __name__ == "__main__":
    sys.exit(main())
