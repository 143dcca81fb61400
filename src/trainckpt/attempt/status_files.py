"""Status files: small JSON files by which the processes of a launch report to each other.

They live in the folder of one launch, on one host. What is stored of an attempt for good is its
record (`format.attempt_record`).

    rank<r>.json       `RankStatus`
    pace<r>.json       `RankProgress`, about once a second
    rest<r>.json       `dumping.handshake.RankQuiesced`
    rest.json          `dumping.handshake.DumpRequest`, the supervisor's
    supervisor.json    `Supervisor`
    restored.json      `RestoreAnnouncement`, the supervisor's
    restoring.pid      of the supervisor, until it has released all restored processes
    nested-<pid>.json  `launcher.nested.Nested`, of each supervisor inside the launch
    imported-<pid>     empty: trainckpt was imported, this command is one that resumes

Each file holds the fields of its dataclass. `write_status` replaces it in one step, and the readers
skip a file with a field that is not of its declared type and range: its text comes from another
process.

The supervisor names the folder in TRAINCKPT_SUPERVISOR. Launchers swallow exit codes and know
nothing of attempts, so every rank reports here: rank 0 may be on another host. No process waits for
another, and a file that cannot be written stops nothing.

Ranks notice by `supervisor.json` that the supervisor was killed: the file exists before they do,
and goes with the folder when the supervisor ends by itself. A supervisor that restores processes
from a dump replaces it before they run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from trainckpt.attempt.heartbeat import is_alive
from trainckpt.errors import TrainckptError
from trainckpt.format.duration import MOST_S
from trainckpt.storage.private_files import atomic_write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
MOST = 2**30  # of any number of a process, rank or exit code; with 128 more it is still a C int
Pid = Annotated[int, range(1, MOST)]
ExitCode = Annotated[int, range(MOST)]
ByteCount = Annotated[int, range(2**63)]


SUPERVISOR_VARIABLE = "TRAINCKPT_SUPERVISOR"
MAX_BYTES = 64 * 1024
# state
LISTENING, CLAIMED, LEFT = "listening", "claimed", "left"
RETURNED = "returned"  # left, and the script goes on by itself
# how a rank left, besides the outcomes of format.attempt_record
REFUSED = "refused"


@dataclass(frozen=True)
class RankStatus:
    """Status of one rank.

    Attributes:
        state: `LISTENING` (it hears signals), `CLAIMED` (it belongs to `attempt`), `LEFT`, or
            `RETURNED` (it has left, and its script goes on).
        grace_s: The option `grace`, in seconds; None: the run has no deadline of its own.
        how: Once it has left: "stopped", "finished", "failed" or "refused".
        exit_code: Intended exit code of its process.
        survives_s: Once another rank has died, its extra seconds: first to find that out, then
            to save. None: it does not save.
        asked: It has found a notice that came to the ranks alone, such as that of `pause`, or has
            stopped for one.
        namespace: Kernel's name of its pid namespace; "": not known. A container's process ids
            differ from those that its supervisor sees.
        deaf: It hears no signals, but notice files: its Checkpointer was not made on main.
        encrypt_to: Recipients of its snapshots, and of images of its memory.
    """

    rank: int
    pid: Pid
    host: str
    run: str
    attempt: int | None = None
    state: str = LISTENING
    grace_s: float | None = None
    how: str | None = None
    exit_code: int | None = None
    asked: bool = False
    survives_s: float | None = None
    namespace: str = ""
    encrypt_to: tuple[str, ...] = ()
    deaf: bool = False


class RankStatusWriter:
    """Writer of this rank's status. Without a supervisor every call does nothing. Any thread."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._folder = launch_folder()
        rank = os.environ.get("RANK", "")
        number = int(rank) if rank.isdecimal() else 0
        self._lock = threading.Lock()
        deaf = threading.current_thread() is not threading.main_thread()
        self._status = RankStatus(number, os.getpid(), socket.gethostname(), str(run), deaf=deaf)

    def update(self, **changes: Any) -> None:
        """Change some fields and write the file."""
        with self._lock:
            # Read anew each time: a dump may have been restored in another namespace.
            self._status = replace(self._status, namespace=namespace_of("self"), **changes)
            if self._folder and os.getpid() == self._status.pid:
                with contextlib.suppress(OSError):
                    path = self._folder / f"rank{self._status.rank}.json"
                    write_status(path, self._status)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Report a refusal to begin: the launcher would swallow the exit code of its error."""
        try:
            yield
        except TrainckptError as error:
            self.update(state=LEFT, how=REFUSED, exit_code=error.exit_code)
            raise


def launch_folder() -> Path | None:
    """Return the folder shared by this launch and its supervisor; None: there is none."""
    folder = os.environ.get(SUPERVISOR_VARIABLE)
    return Path(folder) if folder else None


def namespace_of(pid: int | str) -> str:
    """Return the pid namespace of a process, see `RankStatus.namespace`."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def write_status(path: Path, status: Any) -> None:
    """Write a dataclass; raise `OSError` if that is not possible."""
    atomic_write_json(path, asdict(status))


def read_status(path: Path, kind: type[T]) -> T | None:
    """Return the status in a file; None if it is missing or holds no `kind`."""
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        return parse_status(json.loads(file.read(MAX_BYTES)), kind)
    return None


def read_statuses(folder: Path, pattern: str, kind: type[T]) -> list[tuple[T, float]]:
    """Return the status in each of these files that holds a `kind`, oldest first.

    The second value is the time at which it was written (`time.time`).
    """
    statuses = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            written_at = path.stat().st_mtime
            if (status := read_status(path, kind)) is not None:
                statuses.append((status, written_at))
    return sorted(statuses, key=lambda each: each[1])


def parse_status(body: Any, kind: type[T]) -> T | None:
    """Return the JSON object as the dataclass `kind`; None if a field is not what it declares."""
    types = _field_types(kind)  # type: ignore[arg-type] # every class has a hash
    if not isinstance(body, dict) or not body.keys() <= types.keys():
        return None
    fields = {name: tuple(value) if type(value) is list else value for name, value in body.items()}
    if not all(_fits(value, types[name]) for name, value in fields.items()):
        return None
    with contextlib.suppress(TypeError):  # one is missing
        return kind(**fields)
    return None


@cache
def _field_types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fits(value: Any, kind: Any) -> bool:
    """Return True if a value is of a declared type, and in its range."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type(value) is arguments[0] and value in arguments[1]
    if origin is tuple:
        return type(value) is tuple and all(_fits(each, arguments[0]) for each in value)
    if arguments:  # a union
        return any(_fits(value, each) for each in arguments)
    if kind is float:
        return type(value) in (int, float) and 0 <= value <= MOST_S
    if kind is int:
        return type(value) is int and abs(value) < MOST
    return type(value) is kind and (kind is not str or "\0" not in value)


def read_rank_statuses(folder: Path) -> dict[int, RankStatus]:
    """Return the status of this host's ranks, by rank; an unreadable file is skipped."""
    statuses = read_statuses(folder, "rank*.json", RankStatus)
    return {status.rank: status for status, _ in statuses}


def has_imported(folder: Path, besides: int | None = None) -> bool:
    """Return True if a process of this launch, except `besides`, has imported trainckpt."""
    return any(path.name != f"imported-{besides}" for path in folder.glob("imported-*"))


def remove_import_mark() -> None:
    """Remove this process's import mark: the command `trainckpt` trains nothing."""
    folder = launch_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            _mark(folder).unlink()


def _mark(folder: Path) -> Path:
    return folder / f"imported-{os.getpid()}"


if (_folder := launch_folder()) is not None:  # this process has imported trainckpt
    with contextlib.suppress(OSError):
        _mark(_folder).touch()

SUPERVISOR_FILE = "supervisor.json"


@dataclass(frozen=True)
class Supervisor:
    """The supervisor's process, as `RankStatus` has its own."""

    pid: Pid
    namespace: str


def this_supervisor() -> Supervisor:
    """Return this process as the supervisor."""
    return Supervisor(os.getpid(), namespace_of("self"))


def is_supervised() -> bool:
    """Return True if this process has a supervisor that was not killed."""
    folder = launch_folder()
    return folder is not None and not supervisor_died(folder)


def supervisor_died(folder: Path) -> bool:
    """Return True if the supervisor was killed.

    False if the file does not name it, or if this process is in another pid namespace, as in a
    container.
    """
    supervisor = read_status(folder / SUPERVISOR_FILE, Supervisor)
    return (
        supervisor is not None
        and supervisor.namespace != ""
        and supervisor.namespace == namespace_of("self")
        and not is_alive(supervisor.pid)
    )


# ---- progress: whether a boundary can be reached before a deadline
#
# The supervisor judges by it, also while the training thread holds up everything else.

FIRST_SAVE_S = 1.0  # estimate for a run without a save yet


@dataclass(frozen=True)
class RankProgress:
    """One rank's reported progress.

    Attributes:
        since_s: Seconds since its last boundary, at the time of reading.
        micro_batch_s: Duration of a recent micro-batch; None: not known yet.
        save_s: Duration of the last save; None: no save yet.
    """

    since_s: float
    micro_batch_s: float | None
    save_s: float | None

    def boundary_s(self) -> float | None:
        """Return the estimated seconds until the rank has reached a boundary and saved there.

        A micro-batch already slower than usual is assumed to take as long again. None before the
        first boundary.
        """
        if self.micro_batch_s is None:
            return None
        left_s = self.micro_batch_s - self.since_s
        left_s = left_s if left_s >= 0 else self.since_s
        return left_s + (FIRST_SAVE_S if self.save_s is None else self.save_s)


def read_paces(folder: Path) -> list[RankProgress]:
    """Return the progress reports of this host's ranks, as of now."""
    now = time.time()
    return [
        replace(progress, since_s=progress.since_s + max(0.0, now - written_at))
        for progress, written_at in read_statuses(folder, "pace*.json", RankProgress)
    ]


# ---- a restore from a process dump, announced to the restored processes
#
# `restored.json` also describes the new job: its start on the monotonic clock, and its end as in
# Slurm's variable, or null. The supervisor claims the new attempt and writes the file before the
# processes run again. So a read before the dump gives the old number, a later one the new. Ranks
# that read for one purpose compare the results, and the largest counts.
#
# The processes run again one after the other. If one ends while another is still held, the
# supervisor takes that for a failure and ends all. So a process waits until all have been released
# before it may end.

RESTORED_FILE, RESTORING_FILE = "restored.json", "restoring.pid"
ALL_RUN_WITHIN_S, POLL_EVERY_S = 60.0, 0.005


@dataclass(frozen=True)
class RestoreAnnouncement:
    """The job in which restored processes go on.

    Attributes:
        attempt: Their new attempt.
        started: Start of the job, on the monotonic clock.
        job_ends: Value of `SLURM_JOB_END_TIME`, or None.
    """

    attempt: int
    started: float
    job_ends: str | None


def read_restore_announcement() -> RestoreAnnouncement | None:
    """Return the job that this process was restored in; None: it is still in its own."""
    folder = launch_folder()
    return read_status(folder / RESTORED_FILE, RestoreAnnouncement) if folder else None


def restore_files(attempt: int, started_s: float, job_ends: str | None) -> dict[str, str]:
    """Return the files that announce a restore: new attempt, supervisor, and restore in progress.

    Names and texts, in the order in which they are written.
    """
    job = RestoreAnnouncement(attempt, started_s, job_ends)
    return {
        RESTORING_FILE: str(os.getpid()),
        RESTORED_FILE: json.dumps(asdict(job)),
        SUPERVISOR_FILE: json.dumps(asdict(this_supervisor())),
    }


def announce_all_run(folder: Path) -> None:
    """Announce that the supervisor has released all restored processes."""
    with contextlib.suppress(OSError):
        (folder / RESTORING_FILE).unlink()


def wait_until_all_run(folder: Path) -> None:
    """Wait for `announce_all_run` while the supervisor lives, at most `ALL_RUN_WITHIN_S`."""
    until = time.monotonic() + ALL_RUN_WITHIN_S
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < until:
            if not is_alive(int((folder / RESTORING_FILE).read_text(encoding="ascii"))):
                return
            time.sleep(POLL_EVERY_S)
