"""Compare the advice and the simulator with real runs whose attempts are killed.

    python -m benchmarks.planning --json OUT [--intervals 9] [--runs 20]

intervals   three runs of different save costs are recorded at some interval, and `advise` is asked.
            Then runs with nine intervals, and one with the advised interval, are killed as often:
            each attempt after about as many steps, spread evenly over the phases of the interval.
            Lost: stalls, restores and training that was repeated, for each second of training that
            was kept. Restarts cost as much at each interval, and are not in it
simulator   runs are killed at known seconds; the simulator replays these, with the step, the stall,
            the restore and the restart of one further run. Lost: the wall time less training kept
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine

from trainckpt.attempt.goodput import GAP, PREPARATION, RESTORE, SAVE, TRAINING, WASTED, account
from trainckpt.planning.advice import for_run
from trainckpt.planning.cluster import Cluster
from trainckpt.planning.faults import RANK, Fault, FaultModel, of_trace
from trainckpt.planning.run_history import MeasuredRun, measure
from trainckpt.planning.save_systems import MEMORY, SavedLevel, SaveSystem, build_system
from trainckpt.planning.simulation import simulate
from trainckpt.run_directory.run_url import open_run_tier
from trainckpt.snapshot import attempt_history

STEP_S = 0.03
FEATURES = (500, 1200, 2000)  # 2, 12 and 32 MB of state
STEPS_BETWEEN = 100  # kills, in the mean: long beside a restart, which no kill interrupts
KILLS = 12
STEPS = 1000
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)


def train(folder: Path, **specification: Any) -> dict[str, Any]:
    """Train a run with its kills, in a process of its own; return what it prints."""
    command = [sys.executable, "-m", "benchmarks.planning.killed_run", str(folder)]
    done = subprocess.run(
        [*command, json.dumps(specification)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(folder: Path) -> MeasuredRun:
    """Return what the run's attempts have measured."""
    return measure(attempt_history.read_attempts(open_run_tier(folder)), None)


# ---- nine intervals


def kills_for(every: int) -> list[int]:
    """Return the steps after which attempts are killed: the mean is the same for each interval.

    An attempt begins at a multiple of the interval, so the kill's phase is the rest.
    """
    spread = [(number + 0.5) / KILLS * every - every / 2 for number in range(KILLS)]
    return [max(1, round(STEPS_BETWEEN + offset)) for offset in spread]


def lost_to_checkpoints(folder: Path) -> float:
    """Return the seconds lost for each second of training that was kept."""
    buckets = account(attempt_history.read_attempts(open_run_tier(folder))).buckets
    return sum(buckets[name] for name in (SAVE, WASTED, RESTORE)) / buckets[TRAINING]


def try_intervals(features: int, intervals: int, scratch: Path) -> dict[str, Any]:
    """Record a run, ask for advice, and try intervals around and at it."""
    job = {"features": features, "step_s": STEP_S, "steps": STEPS}
    recorded = scratch / f"recorded-{features}"
    train(recorded, **job, every="10 steps", kills_after=kills_for(10))
    run = measured(recorded)
    advised = for_run(run)
    best = max(1, round(advised.plan.intervals["local"] / run.step_s))
    first = (len(FACTORS) - intervals) // 2
    tried = {max(1, round(best * f)) for f in FACTORS[first : first + intervals]}
    for extra in range(1, intervals):  # small ones fall together
        if len(tried) >= intervals:
            break
        tried.add(max(tried) + extra * best)
    rows = []
    for every in sorted({*tried, best}):
        folder = scratch / f"tried-{features}-{every}"
        train(folder, **job, every=f"{every} steps", kills_after=kills_for(every))
        rows.append(
            {"every_steps": every, "lost": lost_to_checkpoints(folder), "advised": every == best}
        )
    least = min(row["lost"] for row in rows)
    own = next(row["lost"] for row in rows if row["advised"])
    return {
        "state_bytes": 8 * features**2,
        "stall_s": run.stall_s,
        "step_s": run.step_s,
        "mtbf_s": run.mtbf_s,
        "option": advised.options[0].value,
        "advised_steps": best,
        "advised_lost": own,
        "least_lost": least,
        "above_least": own / least - 1.0,
        "tried": rows,
    }


# ---- the simulator


@dataclass(frozen=True)
class Calibration:
    """Figures of a further run.

    Attributes:
        step_s, stall_s, restore_s: Means.
        commit_s: From the boundary of a save to its commit.
        restart_s: From a kill until the next attempt trains, without its restore.
        start_s: From the launch of the first attempt until it trains.
    """

    step_s: float
    stall_s: float
    restore_s: float
    restart_s: float
    start_s: float
    commit_s: float


def calibrate(folder: Path, job: dict[str, Any]) -> Calibration:
    """Train and kill a run, and take its means."""
    ended = train(folder, **job, kills_s=[3.0, 6.0, 9.0, 12.0], timed_saves=10)
    run = measured(folder)
    accounts = account(attempt_history.read_attempts(open_run_tier(folder))).attempts
    restarts = [a.buckets[GAP] + a.buckets[PREPARATION] for a in accounts[1:]]
    return Calibration(
        step_s=run.step_s,
        stall_s=run.stall_s,
        restore_s=run.restore_s,
        restart_s=statistics.fmean(restarts),
        start_s=accounts[0].buckets[PREPARATION],
        commit_s=ended["commit_s"],
    )


def predict(found: Calibration, steps: int, every: int, killed_s: list[float]) -> float:
    """Return the seconds that the simulator says are lost."""
    cluster = Cluster(
        gpus=1,
        state_bytes=1.0,
        step_s=found.step_s,
        gpus_per_host=1,
        restart_s=found.restart_s,
    )
    level = SavedLevel(
        place=MEMORY,
        stall_s=found.stall_s,
        copy_s=found.commit_s - found.stall_s,
        restore_s=found.restore_s,
        every_steps=every,
    )
    expected = build_system("synchronous", cluster, FaultModel(means_s={RANK: 100.0})).expected
    faults = of_trace([Fault(at_s - found.start_s, RANK) for at_s in killed_s])
    outcome = simulate(cluster, SaveSystem("run", (level,), expected), faults, steps=steps)
    return outcome.lost_s + found.start_s


def replay(runs: int, scratch: Path) -> dict[str, Any]:
    """Kill runs at known times; compare what they lose with the simulator."""
    draw = random.Random(36)
    steps, every = 400, 40
    job = {"features": 500, "step_s": STEP_S, "steps": steps, "every": f"{every} steps"}
    found = calibrate(scratch / "calibration", job)
    rows = []
    for number in range(runs):
        gaps = [draw.uniform(2.0, 5.0) for _ in range(4)]
        kills_s = [sum(gaps[: count + 1]) for count in range(len(gaps))]
        folder = scratch / f"killed-{number}"
        ended = train(folder, **job, kills_s=kills_s)
        kept_s = account(attempt_history.read_attempts(open_run_tier(folder))).buckets[TRAINING]
        rows.append(
            {
                "kills_s": [round(at_s, 3) for at_s in ended["killed_s"]],
                "lost_s": ended["wall_s"] - kept_s,
                "simulated_s": predict(found, steps, every, ended["killed_s"]),
            }
        )
    lost_s, simulated_s = (sum(row[key] for row in rows) for key in ("lost_s", "simulated_s"))
    return {
        "calibration": vars(found),
        "steps": steps,
        "every_steps": every,
        "lost_s": lost_s,
        "simulated_s": simulated_s,
        "difference": simulated_s / lost_s - 1.0,
        "runs": rows,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--intervals", type=int, default=9)
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.words()}
    with tempfile.TemporaryDirectory() as scratch:
        result["simulator"] = replay(arguments.runs, Path(scratch))
        print(
            f"lost {result['simulator']['lost_s']:.1f} s, "
            f"simulated {result['simulator']['simulated_s']:.1f} s",
            flush=True,
        )
        result["intervals"] = []
        for features in FEATURES:
            result["intervals"].append(try_intervals(features, arguments.intervals, Path(scratch)))
            row = result["intervals"][-1]
            print(
                f"{row['state_bytes']} bytes: {row['option']}, lost {row['advised_lost']:.3f}, "
                f"least {row['least_lost']:.3f}",
                flush=True,
            )
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
