"""One uninstrumented run, dumped and restored again and again at random instants.

`python -m tests.process_dump.campaign --pauses 50 --workers 2` prints one line of JSON: how often
it was paused, how long each pause and each restore took, and whether every rank printed exactly the
lines of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "process_dump" / "gloo_script.py"
CLI = [sys.executable, "-m", "trainckpt.cli.main"]
OWN_NETWORK = [sys.executable, "-I", "-S", str(ROOT / "tests" / "alone.py"), "--network"]
LIMIT_S = 240.0


def environment(**more):
    # None of it may depend on how many tests run beside it.
    found = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINCKPT_DUMPS", "PET_"))}
    return {**found, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in more.items()}}


class Run:
    """One run in a folder of its own, and what its attempts have printed, in order."""

    def __init__(self, folder, script=SCRIPT, nproc=2, **variables):
        self.folder, self.run = Path(folder), str(Path(folder) / "run")
        self.script, self.nproc, self.environment = script, nproc, environment(**variables)
        self.attempts, self.before, self.network = 0, (), OWN_NETWORK
        self.process = None

    def start(self, *options):
        verb = [*options, "--run", self.run, "--nproc", str(self.nproc), "--", str(self.script)]
        return self._launch("run", *verb)

    def resume(self, *options):
        return self._launch("resume", self.run, *options)

    def _launch(self, *arguments):
        self.attempts += 1
        with self.log("out").open("wb") as out, self.log("err").open("wb") as err:
            self.process = subprocess.Popen(
                [*self.before, *self.network, *CLI, *arguments],
                stdout=out,
                stderr=err,
                env=self.environment,
                start_new_session=True,
                cwd=self.folder,
            )
        return self

    def log(self, kind, attempt=None):
        return self.folder / f"{attempt or self.attempts}.{kind}"

    def lines(self, attempt=None):
        try:
            return self.log("out", attempt).read_text().splitlines()
        except FileNotFoundError:
            return []

    def all_lines(self):
        return [line for at in range(self.attempts) for line in self.lines(at + 1)]

    def said(self):
        return self.log("err").read_text()

    def wait_lines(self, more):
        """Until this attempt has printed so many lines; at its last step it prints no more."""
        last = int(self.environment.get("COUNT", "0")) - 2
        at_its_end = f" step {last} "

        def is_there():
            found = self.lines()
            at_last = any(at_its_end in line for line in found)
            return len(found) >= more or at_last or self.process.poll() is not None

        return wait_for(is_there, self)

    def record(self, attempt=None):
        """Until this attempt's record is there: from then on it can be paused."""
        path = Path(self.run) / "attempts" / f"{attempt or self.attempts}.json"
        beat = path.with_suffix(".heartbeat")
        return wait_for(lambda: beat.exists() or self.process.poll() is not None, self)

    def pause(self, *options):
        return subprocess.run(
            [*CLI, "pause", "--json", self.run, *options],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=LIMIT_S,
            check=False,
        )

    def wait(self):
        return self.process.wait(LIMIT_S)

    def end(self):
        """Whatever still runs of it, by its own supervisor: twice SIGINT kills the tree."""
        if self.process is not None and self.process.poll() is None:
            for _ in range(2):
                self.process.send_signal(2)
                time.sleep(0.2)
            self.process.wait(LIMIT_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


def wait_for(condition, run):
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() >= until:
            raise AssertionError(f"{run.said()}\n{run.lines()[-3:]}")
        time.sleep(0.02)


def of_each_rank(lines):
    """Rank -> its lines, in order: how the ranks' lines mix is nobody's promise."""
    found = {}
    for line in lines:
        found.setdefault(line.split()[1], []).append(line)
    return found


def paused_often(folder, reference, pauses, rng, **variables):
    """Run it with so many pauses, every other by SIGTERM; return the seconds of each and of every
    restore."""
    seconds = {"pause": [], "restore": []}
    gate, steps = Path(folder) / "gate", variables["COUNT"] - 1
    with Run(folder, GATE=gate, **variables) as run:
        run.start()
        for number in range(pauses):
            run.record()
            if all(len(lines) < steps for lines in of_each_rank(run.all_lines()).values()):
                run.wait_lines(1 + rng.randrange(6))
            time.sleep(rng.random() * 0.2)  # anywhere inside a step
            assert run.process.poll() is None, f"it ended too early: {run.said()}"
            begun = time.monotonic()
            if number % 2:
                run.process.terminate()  # a notice to the supervisor: nobody listens below it
            else:
                done = run.pause()
                assert done.returncode == 0, done.stdout + done.stderr + run.said()
                told = json.loads(done.stdout)
                assert (told["outcome"], told["kind"]) == ("stopped", "dump"), told
            assert run.wait() == 75, run.said()
            seconds["pause"].append(time.monotonic() - begun)
            begun = time.monotonic()
            run.resume().record()
            seconds["restore"].append(time.monotonic() - begun)
        gate.touch()
        assert run.wait() == 0, run.said()
        assert not (differs := what_differs(run, reference)), differs
    return seconds


def what_differs(run, reference):
    """Nothing, or where each rank's lines first differ, with what every attempt said."""
    asked, printed = of_each_rank(reference), of_each_rank(run.all_lines())
    if printed == asked:
        return ""
    told = []
    for rank in sorted({*asked, *printed}):
        pairs = zip_longest(asked.get(rank, []), printed.get(rank, []))
        first = [
            f"line {at}: {want!r}, printed {got!r}"
            for at, (want, got) in enumerate(pairs)
            if want != got
        ][:3]
        told.append(f"rank {rank}: {'; '.join(first) or 'as asked'}")
    for at in range(1, run.attempts + 1):
        told += [f"attempt {at}, {len(run.lines(at))} lines:", run.log("err", at).read_text()]
    return "\n".join(told)


def straight(folder, **variables):
    with Run(folder, **variables) as run:
        assert run.start().wait() == 0, run.said()
        return run.lines()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pauses", type=int, default=50)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    variables = {"COUNT": arguments.count, "WORKERS": arguments.workers, "PAUSE_S": 0.1}
    with tempfile.TemporaryDirectory(prefix="trainckpt-dumps-") as place:
        folders = [Path(place) / name for name in ("straight", "paused")]
        for folder in folders:
            folder.mkdir()
        reference = straight(folders[0], **{**variables, "PAUSE_S": 0})
        rng = random.Random(arguments.seed)
        seconds = paused_often(folders[1], reference, arguments.pauses, rng, **variables)
    median = {name: round(sorted(each)[len(each) // 2], 2) for name, each in seconds.items()}
    print(
        json.dumps(
            {
                "pauses": arguments.pauses,
                "workers": arguments.workers,
                "lines": len(reference),
                "median_s": median,
                "exact": True,
            }
        )
    )


if __name__ == "__main__":
    main()
