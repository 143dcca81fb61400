"""One long run that a fault hits every 20 seconds on the average: python -m tests.chaos.soak

    --for 2h          how long faults go on; the run ends after that
    --json FILE       the verdict, all faults, and what was sampled
    --png FILE        memory, descriptors and files over time
    --go-on FOLDER    the same run goes on in the folder of a soak that ended, with what is in
                      FILE; its shared memory is lost, as by a power cut

Two ranks train under one `trainckpt run` with workers, a folder and a slower tier in an object
store. Faults are drawn from the catalogue of `tests.chaos`. Those that end the supervisor are
rarer, so that each supervisor lives for minutes. Left out are faults after which a run may refuse
to go on, or may hang as the catalogue says.

Every five seconds the memory, threads and descriptors of the supervisor and of the ranks are
noted, with the files and shared memory of the run. The run must end as the reference, with nothing
left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from tests.campaign.__main__ import seconds
from tests.campaign.cases import Settings
from tests.campaign.check import compared
from tests.campaign.launch import library_commit
from tests.campaign.watch import Scene
from tests.chaos import drive, judge, rooms
from tests.chaos.__main__ import ALONE
from tests.chaos.attempt import Attempt
from tests.chaos.faults import CATALOGUE, MOST_S, OLDER, REFUSED
from tests.chaos.rooms import Room
from tests.chaos.stage import stage, why_not

if TYPE_CHECKING:
    from tests.chaos.stage import Stage

GAP_S = 20.0
MOST_GAP_S = 60.0
LASTS_S = (0.1, 4.0)
RARE = 0.12  # weight of a fault that ends the supervisor, or all
ENDS_SUPERVISOR = (
    *("SIGTERM", "SIGTERM to all", "SIGUSR1", "SIGINT twice", "all killed", "power cut"),
    *("launcher killed", "launcher told"),
)
LEFT_OUT = ("memory limit", "directory away")  # a start without the directory begins another run
STANDS_STILL_S = 240.0  # without a micro-batch: a hang
LOOK_S, SAMPLE_S = 0.02, 5.0
MANY_RESTARTS = 1_000_000
UP_SHARE = 0.5  # of the time that is trained in, about
SEED = 1
OF_A_PART = ("commit", "launches", "wrong")


@dataclass(frozen=True)
class LongSettings(Settings):
    """Settings of a run with more steps than those of a case."""

    num_steps: int

    @property
    def steps(self) -> int:
        return self.num_steps


@dataclass(frozen=True)
class LongRoom(Room):
    """A room for a run of so many steps."""

    num_steps: int

    @property
    def settings(self) -> LongSettings:
        return LongSettings(*vars(super().settings).values(), self.num_steps)


def long_room(num_steps: int) -> LongRoom:
    """The room of the soak."""
    return LongRoom(
        trainer=rooms.PLAIN,
        layout="ddp",
        ranks=2,
        workers=2,
        bf16=False,
        hosts=1,
        place=rooms.TIER,
        redundancy="none",
        encrypted=False,
        survivors=False,
        save_every=3,
        launcher=rooms.RUN,
        num_steps=num_steps,
    )


@dataclass
class Sample:
    """What there was at one moment; bytes, or numbers of them.

    Attributes:
        at_s: Seconds since the soak began.
        trained: Micro-batches of rank 0.
        attempt: The supervisor's number.
        processes: Role -> resident bytes, descriptors, threads, and age in seconds.
        files, folder_bytes: Of the run directory.
        memory_bytes: Shared memory of the run.
        objects: Of the slower tier.
    """

    at_s: float
    trained: int
    attempt: int
    processes: dict[str, list[float]] = field(default_factory=dict)
    files: int = 0
    folder_bytes: int = 0
    memory_bytes: int = 0
    objects: int = 0


class Soak(drive.Play):
    """The run, with faults for `duration_s`; 0: without any, as a reference."""

    def __init__(
        self,
        stage: Stage,
        room: LongRoom,
        duration_s: float,
        before: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(stage, drive.Case(int(duration_s), room, (), MANY_RESTARTS))
        self.duration_s, self.problem = duration_s, ""
        before = before or {"faults": [], "samples": [], "launches": 0}
        self.hits: list[dict[str, Any]] = before["faults"]
        self.samples = [Sample(**sample) for sample in before["samples"]]
        self.attempts = [drive.Ended(([0], []), []) for _ in range(before["launches"])]
        if self.attempts:
            self.attempts[0].hits = [(hit["fault"], hit["where"], 0) for hit in self.hits]
        begun_s = self.samples[-1].at_s if self.samples else 0.0
        self._draws = Random(SEED + before["launches"])
        self._begun_s = time.monotonic() - begun_s
        self._due_s = begun_s + self._next()
        self._sampled_s = begun_s
        self._progress = (0, time.monotonic())
        possible = [n for n, f in CATALOGUE.items() if f.needs(room) and n not in LEFT_OUT]
        self._faults = [n for n in possible if not CATALOGUE[n].permits & {OLDER}]
        self._faults = [n for n in self._faults if CATALOGUE[n].end or not self._refuses(n)]

    @staticmethod
    def _refuses(name: str) -> bool:
        return REFUSED in CATALOGUE[name].permits

    def soak(self) -> None:
        """Run attempts until the run has finished, or stands still."""
        while not self.problem:
            before = self.scene.line_counts(), self.scene.snapshots(committed=True)
            ended = drive.Ended(before, [name for name, _ in self._standing])
            self.attempts.append(ended)
            number = len(self.attempts)
            self.attempt = Attempt(
                self.stage,
                self.room,
                self.places,
                number,
                restarts=self.case.restarts,
                pace_s=self._pace_s(),
            )
            try:
                self._watch(ended)
            finally:
                self.attempt.close()
            ended.finals = self.scene.finals()
            code = ended.codes[0]
            self._say(f"launch {number} ended with {code}")
            if ended.finished:
                break
            explained = {75, *(c for n in ended.faults for c in CATALOGUE[n].ends)}
            if code not in explained:
                self.problem = f"launch {number} ended with {code} after {ended.faults[-5:]}"
        self._settle()

    def _watch(self, ended: drive.Ended) -> None:
        while None in (codes := self.attempt.codes()):
            now = time.monotonic()
            self._end_due(now)
            since_s = now - self._begun_s
            if since_s > self.duration_s and not self._standing:
                self.attempt.gate.touch()
            elif since_s > self._due_s:
                self._due_s = since_s + self._next()
                self._hit(ended, since_s)
            if since_s > self._sampled_s:
                self._sampled_s = since_s + SAMPLE_S
                self._sample(since_s)
                if self.problem:
                    self.attempt.kill()
            time.sleep(LOOK_S)
        ended.codes = codes

    def _next(self) -> float:
        return min(self._draws.expovariate(1 / GAP_S), MOST_GAP_S)

    def _hit(self, ended: drive.Ended, since_s: float) -> None:
        weights = [RARE if name in ENDS_SUPERVISOR else 1.0 for name in self._faults]
        name = self._draws.choices(self._faults, weights)[0]
        lasts_s = min(self._draws.uniform(*LASTS_S), MOST_S)
        if name in [standing for standing, _ in self._standing]:
            return
        self._random.seed(self._draws.random())
        fault = CATALOGUE[name]
        where = fault.begin(self)
        if not where:
            return
        ended.hits.append((name, where, self._progress[0]))
        self.hits.append({"at_s": round(since_s, 1), "fault": name, "where": where})
        self._say(f"{name}: {where}")
        if fault.end is not None:
            self._standing.append((name, time.monotonic() + lasts_s))

    def _pace_s(self) -> float:
        left_s = self.duration_s - (time.monotonic() - self._begun_s)
        left = self.room.settings.micro_batches - max(self.scene.line_counts())
        return min(max(0.0, UP_SHARE * left_s / max(left, 1)), 1.0)

    def _sample(self, since_s: float) -> None:
        trained = self.scene.line_counts()[0]
        if trained != self._progress[0] or self._standing:
            self._progress = trained, time.monotonic()
        at_gate = trained >= self.room.settings.micro_batches - 4
        if time.monotonic() - self._progress[1] > STANDS_STILL_S and not at_gate:
            self.problem = f"no micro-batch for {STANDS_STILL_S:.0f} s after {self.hits[-3:]}"
        sample = Sample(round(since_s, 1), trained, len(self.attempts))
        roles = {"supervisor": self.attempt.launcher_pid()}
        roles |= {f"rank {rank}": pid for rank, pid in self.attempt.rank_pids().items()}
        for role, pid in roles.items():
            if (found := _process(pid)) is not None:
                sample.processes[role] = found
        sample.files, sample.folder_bytes = _folder(self.places.run)
        sample.memory_bytes = _folder(self.stage.memory_of(self.room, 0))[1]
        sample.objects = _folder(self.places.tier)[0] if self.places.tier else 0
        self.samples.append(sample)

    def _say(self, what: str) -> None:
        at_s = time.monotonic() - self._begun_s
        print(f"{at_s:7.0f} s, {self._progress[0]} trained: {what}", file=sys.stderr, flush=True)


def _process(pid: int) -> list[float] | None:
    folder = Path("/proc") / str(pid)
    try:
        resident = int((folder / "statm").read_text().split()[1]) * resource.getpagesize()
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        age_s = float(Path("/proc/uptime").read_text().split()[0])
        age_s -= int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return [resident, len(os.listdir(folder / "fd")), int(fields[17]), round(age_s, 1)]  # noqa: PTH208
    except OSError:
        return None


def _folder(folder: Path) -> tuple[int, int]:
    files = num_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(Path(root) / name)
            except OSError:
                continue
            files, num_bytes = files + 1, num_bytes + status.st_blocks * 512
    return files, num_bytes


def verdict(soak: Soak, reference: Soak) -> list[str]:
    """What is wrong, one sentence each."""
    wrong = [soak.problem] if soak.problem else []
    if not soak.attempts[-1].finished:
        return [*wrong, f"the run did not finish: {soak.attempts[-1].codes}"]
    wrong += [*judge.left_behind(soak), *judge.unsound(soak)]
    right = Scene(reference.places.folder, soak.room.ranks)
    return wrong + [w for rank in range(soak.room.ranks) for w in compared(rank, soak.scene, right)]


def draw(samples: list[dict[str, Any]], hits: list[dict[str, Any]], file: Path) -> None:
    """Draw what was sampled."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    hours = [s["at_s"] / 3600 for s in samples]
    figure, axes = plt.subplots(5, 1, sharex=True, figsize=(9, 11), layout="constrained")
    for role in ("supervisor", "rank 0", "rank 1"):
        for axis, number, unit in ((axes[1], 0, 1e6), (axes[2], 1, 1), (axes[3], 2, 1)):
            values = [s["processes"].get(role, [None] * 3)[number] for s in samples]
            shown = [float("nan") if v is None else v / unit for v in values]
            axis.plot(hours, shown, ".", markersize=2, label=role)
    axes[0].plot(hours, [s["trained"] for s in samples])
    axes[0].plot([h["at_s"] / 3600 for h in hits], [0] * len(hits), "|", color="tab:red")
    axes[4].plot(hours, [s["files"] for s in samples], label="files in the run directory")
    axes[4].plot(hours, [s["objects"] for s in samples], label="objects in the tier")
    axes[4].plot(hours, [s["memory_bytes"] / 1e6 for s in samples], label="shared memory, MB")
    titles = ("micro-batches (red: a fault)", "resident memory, MB", "descriptors", "threads", "")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_ylim(bottom=0)
    axes[1].legend(markerscale=4, fontsize=8)
    axes[4].legend(fontsize=8)
    axes[4].set_xlabel("hours")
    figure.savefig(file, dpi=90)


def main() -> int:
    """Run the soak, and tell its verdict."""
    parser = argparse.ArgumentParser(
        "python -m tests.chaos.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--for", dest="duration_s", type=seconds, required=True, metavar="2h")
    parser.add_argument("--steps", type=int, default=0, help="default: 0.4 for each second")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--go-on", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if ALONE not in os.environ:
        alone = str(Path(__file__).parents[1] / "alone.py")
        words = [sys.executable, "-I", "-S", alone, sys.executable, "-m", "tests.chaos.soak"]
        return subprocess.call([*words, *sys.argv[1:]], env={**os.environ, ALONE: "1"})
    if why := why_not():
        print(f"no soak here: {why}", file=sys.stderr)
        return 1
    folder = args.go_on or Path(tempfile.mkdtemp(prefix="trainckpt-soak-"))
    before = json.loads(args.json.read_text()) if args.go_on else None
    room = long_room(args.steps or int(0.4 * args.duration_s))
    with stage(folder) as one:
        reference = Soak(one, rooms.without_saves(room), 0.0)
        if before is None:
            reference.soak()
            one.forget(room)
        soak = Soak(one, room, args.duration_s, before)
        soak.soak()
        wrong = verdict(soak, reference)
    result = {
        "commit": library_commit(),
        "before": [*before["before"], {k: before[k] for k in OF_A_PART}] if before else [],
        "seconds": args.duration_s,
        "steps": room.num_steps,
        "launches": len(soak.attempts),
        "attempts": len(soak.scene.attempt_lines()),
        "wrong": wrong,
        "faults": soak.hits,
        "samples": [vars(sample) for sample in soak.samples],
    }
    if args.json:
        args.json.write_text(json.dumps(result))
    if args.png:
        draw(result["samples"], soak.hits, args.png)
    print(f"{len(soak.hits)} faults, {result['attempts']} attempts: {wrong or 'exact'}; {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
