"""The proof: a script straight, and again stopped and resumed; every batch and state compared.

    1  straight      the script, uninterrupted, recording digests at each boundary
    2  interrupted   the script again in another place. At each chosen micro-batch it is stopped:
                     a real SIGTERM that one rank gets, the last time a real SIGKILL of everything
    3  compare       the interrupted attempts must repeat the straight run bit for bit
    4  doubt         if they do not: straight once more. Values that two straight runs do not
                     repeat, such as times in a log, are listed and left out; where the training
                     itself is not repeated, the script is not deterministic, and that is said

Each run works in a folder of its own (`Workspace`). The user's own run is left alone: its
snapshots stay as they are, and what tracked files held before is put back, however the proof ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.launcher.processes import kill_session
from trainckpt.launcher.supervise import RunResult, supervise
from trainckpt.launcher.torchrun_command import torchrun_command
from trainckpt.prove import compare
from trainckpt.prove.compare import (
    Difference,
    boundaries,
    first_difference,
    num_lost,
    read_records,
    unrepeated,
    unseeded,
)
from trainckpt.recording import script_files
from trainckpt.recording.script_files import PROOF_FOLDER, read_written
from trainckpt.run_directory.run_url import PROVE_VARIABLE, WORK

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence

    Say = Callable[[str], None]


# ---- the working directory of a run of the proof
#
#     <proof>/work/<path of the user's folder>    directories are real, files are links to the
#                                                 user's; beside them, links for `../data`
#
# Each run of the proof gets a fresh one, at the same path, so that a path in the state is the same
# text in all of them. What the script creates or replaces stays in there: `checkpoints/last.ckpt`
# of the straight run is not there for the interrupted one, and the user's own is left alone. A file
# that the script opens and writes over is the user's, as it is for the script.


MOST_ENTRIES = 10_000  # directories beyond them are links
MOST_BESIDE = 1_000  # a folder with more entries is not linked for the sake of `../x`


class Workspace:
    """Working directories for the runs of a proof.

    Args:
        folder: The proof's own.
        origin: The user's working directory.

    Attributes:
        root: What stands for `/`.
    """

    def __init__(self, folder: Path, origin: Path) -> None:
        self._folder, self._origin = folder, origin
        self.root = folder / "work"

    @property
    def path(self) -> Path:
        """Folder in which a run works."""
        return self.root.joinpath(*self._origin.parts[1:])

    def make(self) -> str:
        """Make a fresh one, with the user's files as they are now.

        Returns:
            "", or why it cannot be made, such as a file system without links.
        """
        if len(self._origin.parts) == 1:
            return "it is the root"
        try:
            self.path.parent.mkdir(parents=True)
            inner = self._origin
            for outer in inner.parents[:-1]:
                _link_beside(outer, self.root.joinpath(*outer.parts[1:]), inner)
                inner = outer
            _mirror(self._origin, self.path, self._folder)
            if self.path.is_symlink():
                return f"{self._origin} holds more than {MOST_ENTRIES} files"
        except OSError as error:
            return str(error)
        return ""

    def move_to(self, place: Path) -> None:
        """Keep it there, if it was made: the run has ended."""
        with suppress(FileNotFoundError):
            self.root.rename(place)


def _link_beside(source: Path, target: Path, but: Path) -> None:
    entries = _entries(source)
    for entry in entries if entries is not None and len(entries) <= MOST_BESIDE else ():
        if entry.name != but.name:
            (target / entry.name).symlink_to(entry.path)


def _mirror(source: Path, target: Path, but: Path) -> None:
    """Breadth first. Hidden directories, such as .git and .venv, are links."""
    left, number = deque([(source, target)]), 0
    while left:
        here, there = left.popleft()
        entries = _entries(here)
        if entries is None or number + len(entries) > MOST_ENTRIES:
            there.symlink_to(here)
            continue
        there.mkdir()
        number += len(entries)
        for entry in entries:
            path, name = Path(entry.path), entry.name
            if entry.is_dir(follow_symlinks=False) and not name.startswith("."):
                if path != but:
                    left.append((path, there / name))
            else:
                (there / name).symlink_to(path)


def _entries(folder: Path) -> list[os.DirEntry[str]] | None:
    """None: this user may not look into it."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        return None


# ---- the proof


SHOWN_LOG_LINES, SHOWN_PATHS = 15, 5
POLL_S = 0.02


@dataclass(frozen=True)
class Stop:
    """One planned interruption.

    Attributes:
        at: After so many micro-batches.
        step, micro: The same place as step and micro-batch of its window.
        signal: "SIGTERM" or "SIGKILL".
        rank: Which rank gets it.
    """

    at: int
    step: int
    micro: int
    signal: str
    rank: int


@dataclass(frozen=True)
class Proof:
    """Result of a proof.

    Attributes:
        exact: True if every batch and every state was bitwise identical.
        micro_batches, ranks: Size of the straight run.
        stops: Where it was stopped.
        difference: Where it differs first, or None.
        deterministic: False if two straight runs differ, whatever resume does.
        unseeded: Random generators that the script never seeded; not compared.
        unrepeated: Values that two uninterrupted runs do not repeat; not compared.
        lost: Micro-batches that the interrupted run, which ended early, never trained.
        outside: Files and folders outside the proof's own that the script wrote.
        folder: Where logs and records were kept, or "".
    """

    exact: bool
    micro_batches: int
    ranks: int
    stops: tuple[Stop, ...]
    difference: Difference | None = None
    deterministic: bool = True
    unseeded: tuple[str, ...] = ()
    unrepeated: tuple[str, ...] = ()
    lost: int = 0
    outside: tuple[str, ...] = ()
    folder: str = ""

    def verdict(self) -> str:
        """One line for people."""
        if self.exact:
            inside = [stop for stop in self.stops if stop.micro] or list(self.stops)
            return (
                f"exact: {self.micro_batches} micro-batches on {self.ranks} ranks, resumed from "
                f"step {inside[0].step} micro-batch {inside[0].micro}, bitwise identical"
            )
        kept = f"\nlogs and records: {self.folder}" if self.folder else ""
        if not self.deterministic:
            seeds = f"; never seeded: {', '.join(self.unseeded)}" if self.unseeded else ""
            two = f"two uninterrupted runs {_lower(self.difference)}"
            return f"not deterministic: {two}{seeds}{kept}"
        early = (
            f"; the resumed run ended after {self.micro_batches - self.lost} of "
            f"{self.micro_batches} micro-batches, so the samples of {self.lost} are lost"
        )
        return f"not exact: {self.difference}{early if self.lost else ''}{kept}"

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        return {**asdict(self), "verdict": self.verdict()}


def prove(
    command: Sequence[str],
    *,
    stops: int,
    nproc: int | None,
    keep: str | None,
    say: Say,
    launch: Callable[..., RunResult] = supervise,
) -> Proof:
    """Prove that `command` resumes exactly.

    Args:
        command: Script and arguments, without `python`.
        stops: How often to interrupt it, at least once.
        nproc: Processes under torchrun; None runs it with plain `python`.
        keep: Folder for logs and records; None is a temporary one, kept only on a difference.
        say: Told of progress, a line at a time.
        launch: Runs one attempt to its end, as `supervise` does.

    Raises:
        ConfigurationError: the script failed by itself, or made no Checkpointer.
    """
    if stops < 1:
        raise ConfigurationError("a proof needs at least one stop", hint="--stops 1 or more")
    folder = _folder(keep)
    try:
        return _prove(folder, stops, keep, _Runs(folder, command, nproc, say, launch), say)
    finally:
        for sentence in script_files.restore_files(folder / script_files.FOLDER):
            say(sentence)
        with suppress(OSError):
            (folder / script_files.FOLDER).rmdir()
        with suppress(OSError):  # one that holds logs stays
            folder.rmdir()


def _prove(folder: Path, stops: int, keep: str | None, runs: _Runs, say: Say) -> Proof:
    straight = runs.finish("straight")
    cursors = boundaries(straight)
    last = cursors[-1]["micro_batches"] if cursors else 0
    if last < 2:
        if not keep:
            _remove(folder)
        raise ConfigurationError(
            f"the script passed {len(cursors)} boundaries of a Checkpointer; too few to stop at",
            hint="let it train some micro-batches inside `with trainckpt.Checkpointer(...)`",
        )
    outside = read_written(folder / "straight" / "attempt1")
    if outside:
        more = f" and {len(outside) - SHOWN_PATHS} more" if len(outside) > SHOWN_PATHS else ""
        shown = ", ".join(outside[:SHOWN_PATHS])
        say(f"written outside the proof's folder, by each run to the same place: {shown}{more}")
    planned = plan_stops(cursors, stops, len(straight))
    if len(planned) < stops:
        say(f"{last} micro-batches have room for {len(planned)} of {stops} stops")
    attempts = runs.interrupted(planned)
    left_out = unseeded(straight, attempts[0])
    never_seeded = tuple(sorted(map(compare.say, left_out)))
    for part in never_seeded:
        say(f"{part}: never seeded by the script, so left out of the comparison")
    difference, deterministic = first_difference(straight, attempts, left_out), True
    values: frozenset[str] = frozenset()
    if difference is not None:
        say(f"{difference}; running it straight again, to see whether it repeats itself")
        again = runs.finish("again")
        values = unrepeated(straight, again)
        if found := first_difference(straight, [again], left_out | values):
            difference, deterministic = found, False
        else:
            difference = first_difference(straight, attempts, left_out | values)
    unlike = tuple(sorted(map(compare.say, values)))
    for part in unlike:
        say(f"{part}: two uninterrupted runs differ in it, so left out of the comparison")
    exact = difference is None
    if exact and not keep:
        _remove(folder)
    return Proof(
        exact=exact,
        micro_batches=last,
        ranks=len(straight),
        stops=tuple(planned[: len(attempts) - 1]),
        difference=difference,
        deterministic=deterministic,
        unseeded=never_seeded,
        unrepeated=unlike,
        lost=0 if exact else num_lost(straight, attempts),
        outside=tuple(outside),
        folder="" if exact and not keep else str(folder),
    )


def _remove(folder: Path) -> None:
    """Remove all but the notes of the files to put back, which are read later."""
    for path in folder.iterdir():
        if path.name != script_files.FOLDER:
            shutil.rmtree(path, ignore_errors=True)


def _folder(keep: str | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="trainckpt-prove-"))
    folder = Path(keep).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ConfigurationError(
            f"{keep} cannot be used for the proof: {error}", hint="--keep a new folder"
        ) from error
    if not is_empty:
        raise ConfigurationError(
            f"{keep} is not empty, and a proof starts with empty records", hint="--keep a new one"
        )
    return folder


def plan_stops(cursors: Sequence[dict[str, Any]], stops: int, ranks: int) -> list[Stop]:
    """Spread the stops over the run, inside windows and passes where there are any. Pure.

    The last of several is a SIGKILL; a SIGTERM goes to one rank only, from the last one down. The
    last SIGTERM falls into a pass after the first, if there is one: where a pass ends, and in the
    first, a script goes on rightly that counts its epochs from 0 again.
    There are fewer than asked for where the run has not as many places to stop at.
    """
    last = cursors[-1]["micro_batches"]
    places = {c["micro_batches"]: c for c in reversed(cursors) if 0 < c["micro_batches"] < last}
    ends = _ends_of_passes(cursors)
    inside = [at for at, c in places.items() if c["micro"]] or list(places)
    number = min(stops, len(inside))
    in_passes = sorted(set(inside) - set(ends))
    left = in_passes if len(in_passes) >= number else sorted(inside)
    planned: list[Stop] = []
    for nth in range(1, number + 1):
        wanted = last * nth / (number + 1)
        open_to = left[: len(left) - (number - nth)]  # the later stops need places too
        if nth == max(number - 1, 1):
            open_to = [at for at in open_to if ends and at > ends[0]] or open_to
        at = min(open_to, key=lambda place: abs(place - wanted))
        left = [place for place in left if place > at]
        kind = "SIGKILL" if nth == number and number > 1 else "SIGTERM"
        cursor = places[at]
        planned.append(Stop(at, cursor["step"], cursor["micro"], kind, (ranks - nth) % ranks))
    return planned


def _ends_of_passes(cursors: Sequence[dict[str, Any]]) -> list[int]:
    """Return the counts of micro-batches at which one pass ended and another began."""
    first = {c["micro_batches"]: c["batches"] for c in reversed(cursors)}
    return [at for at, after in pairwise(sorted(first)) if first[after] <= first[at]]


class _Runs:
    """Launches the script for the proof, each attempt with a folder for its records."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        nproc: int | None,
        say: Say,
        launch: Callable[..., RunResult],
    ) -> None:
        self._folder = folder
        self._workspace = Workspace(folder, Path.cwd())
        self._cwd: str | None = None  # the user's
        self._say = say
        self._run = launch
        self._command = (
            [sys.executable, *command] if nproc is None else torchrun_command(nproc, [], command)
        )

    def finish(self, run: str) -> Any:
        """Run to the end; returns the records."""
        with self._working_directory(run):
            return self._finish(run, "attempt1")

    def interrupted(self, planned: Sequence[Stop]) -> list[Any]:
        """Run, stop as planned and resume to the end; returns the records of each attempt.

        There are fewer where the run ends before it comes to a stop.
        """
        run, records = "interrupted", []
        with self._working_directory(run):
            for number, stop in enumerate(planned, start=1):
                ended, found = self._interrupt(run, f"attempt{number}", stop)
                records.append(found)
                if ended.exit_code == 0:
                    if any(stop.at in {key[0] for key in record} for record in found.values()):
                        self._complain(run, f"attempt{number}", f"was not stopped by {stop.signal}")
                    self._say(f"{run}: the run ended before it came to that stop")
                    return records
            return [*records, self._finish(run, f"attempt{len(planned) + 1}")]

    @contextmanager
    def _working_directory(self, run: str) -> Iterator[None]:
        problem = self._workspace.make()
        self._cwd = None if problem else str(self._workspace.path)
        if problem:
            self._say(
                f"{run}: works in the current folder, as no copy with links can be made of "
                f"it: {problem}"
            )
        try:
            yield
        finally:
            self._workspace.move_to(self._folder / run / "work")

    def _finish(self, run: str, attempt: str) -> Any:
        self._say(f"{run}: running to the end")
        ended, records = self._launch(run, attempt, None)
        if ended.exit_code != 0:
            self._complain(run, attempt, f"ended with {ended.exit_code}")
        return records

    def _interrupt(self, run: str, attempt: str, stop: Stop) -> tuple[RunResult, Any]:
        where = f"step {stop.step} micro-batch {stop.micro}"
        whom = "everything" if stop.signal == "SIGKILL" else f"rank {stop.rank}"
        self._say(f"{run}: {stop.signal} to {whom} at {where}")
        ended, records = self._launch(run, attempt, stop)
        record = ended.record.outcome if ended.record is not None else None
        is_stopped = record is not None and record.get("outcome") == "stopped"
        if stop.signal == "SIGTERM" and ended.exit_code != 0 and not is_stopped:
            self._complain(run, attempt, f"ended with {ended.exit_code}, not stopped")
        return ended, records

    def _launch(self, run: str, attempt: str, stop: Stop | None) -> tuple[RunResult, Any]:
        folder = self._folder / run / attempt
        folder.mkdir(parents=True, exist_ok=True)
        plan: dict[str, Any] = {
            "dir": str(folder),
            "place": str(self._folder / run / "run"),
            PROOF_FOLDER: str(self._folder),
            script_files.FOLDER: str(self._folder / script_files.FOLDER),
        }
        if stop is not None:
            plan["strike"] = {"at": stop.at, "signal": stop.signal, "rank": stop.rank}

        def watch(process: subprocess.Popen[bytes]) -> None:
            while process.poll() is None:
                if (folder / "struck").exists():
                    kill_session(process)  # what a SIGKILL leaves of a host: nothing
                time.sleep(POLL_S)

        variables = {}
        if self._cwd is not None:
            plan[WORK], variables["PWD"] = str(self._workspace.root), self._cwd
        variables[PROVE_VARIABLE] = json.dumps(plan)
        with (folder / "log").open("wb") as log:
            ended = self._run(
                self._command, environment=variables, cwd=self._cwd, output=log, watch=watch
            )
        return ended, read_records(folder)

    def _complain(self, run: str, attempt: str, what: str) -> None:
        log = self._folder / run / attempt / "log"
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LOG_LINES:]
        shown = "".join(f"\n  {line}" for line in tail)
        raise ScriptFailed(
            f"the script {what} ({run}); its last lines:{shown}", hint=f"the whole log is {log}"
        )


class ScriptFailed(TrainckptError):
    """The script under proof ended in a way that proves nothing."""

    exit_code = 78


def _lower(difference: Difference | None) -> str:
    return str(difference).replace("differs first", "differ first")
