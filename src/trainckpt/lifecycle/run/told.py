"""What a rank tells the supervisor that launched it: one small file a rank, replaced as it goes on.

    rank<r>.json    {rank, pid, host, run, attempt, state, grace_s, how, exit_code, ...}
    imported-<pid>  trainckpt was imported: this command is one that resumes

The supervisor names the folder in TRAINCKPT_SUPERVISOR. Launchers swallow exit codes and know
nothing of attempts, so what counts is said here, by every rank: rank 0 may be on another host.
Nobody waits for anybody, and a file that cannot be written stops nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TrainckptError
from trainckpt.format.duration import MOST_S

if TYPE_CHECKING:
    from collections.abc import Iterator

SUPERVISOR_VARIABLE = "TRAINCKPT_SUPERVISOR"
MAX_BYTES = 64 * 1024
# state
LISTENING, CLAIMED, LEFT = "listening", "claimed", "left"
RETURNED = "returned"  # left, and the script goes on by itself
# how a rank left, besides the outcomes of format.attempt
REFUSED = "refused"


@dataclass(frozen=True)
class Told:
    """What one rank has said so far.

    Attributes:
        state: `LISTENING` (it hears signals), `CLAIMED` (it belongs to `attempt`), `LEFT`, or
            `RETURNED` (it has left, and its script goes on).
        grace_s: The option `grace`, in seconds; None: the run has no deadline of its own.
        how: Once it has left: "stopped", "finished", "failed" or "refused".
        exit_code: What its process is to end with.
        survives_s: Once another rank has died, how much longer than others it may take: first to
            find that out, then to save. None: it does not.
        asked: It has found a notice that came to the ranks alone, such as that of `pause`.
        namespace: Of its process numbers, by the kernel's name for it; "": not known. A container's
            numbers are others than those that its supervisor sees.
        deaf: It hears no signals, but notice files: its Checkpointer was not made on main.
        encrypt_to: To whom it encrypts what it saves; so are images of its memory.
    """

    rank: int
    pid: int
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


class Teller:
    """This rank's side. Without a supervisor every call does nothing. Any thread."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._folder = folder_of_launch()
        rank = os.environ.get("RANK", "")
        number = int(rank) if rank.isdecimal() else 0
        self._lock = threading.Lock()
        deaf = threading.current_thread() is not threading.main_thread()
        self._told = Told(number, os.getpid(), socket.gethostname(), str(run), deaf=deaf)

    def tell(self, **changes: Any) -> None:
        """Say that some fields have changed."""
        with self._lock:
            # Asked anew each time: a dump may have been restored in another namespace.
            self._told = replace(self._told, namespace=namespace_of("self"), **changes)
            if self._folder and os.getpid() == self._told.pid:
                self._write(self._folder)

    def _write(self, folder: Path) -> None:
        path = folder / f"rank{self._told.rank}.json"
        temporary = path.with_name(path.name + ".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(asdict(self._told)), encoding="utf-8")
            temporary.replace(path)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Around what may refuse to begin: the launcher would swallow the code of its error."""
        try:
            yield
        except TrainckptError as error:
            self.tell(state=LEFT, how=REFUSED, exit_code=error.exit_code)
            raise


def folder_of_launch() -> Path | None:
    """What this launch and its supervisor tell each other lies here; None: there is none."""
    folder = os.environ.get(SUPERVISOR_VARIABLE)
    return Path(folder) if folder else None


def namespace_of(pid: int | str) -> str:
    """Which numbers a process counts in, see `Told.namespace`."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def read_told(folder: Path) -> dict[int, Told]:
    """What the ranks of this host have told, by rank; an unreadable file has said nothing."""
    found = {}
    for path in folder.glob("rank*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            with path.open("rb") as file:
                told = Told(**json.loads(file.read(MAX_BYTES)))
            if _is_readable(told):
                found[told.rank] = replace(told, encrypt_to=tuple(told.encrypt_to))
    return found


def _is_readable(told: Told) -> bool:
    """Whether every field is of its type and in range: it came from a file."""
    numbers = [told.rank, told.pid]
    numbers += [number for number in (told.attempt, told.exit_code) if number is not None]
    words = [told.host, told.run, told.state, told.namespace, *told.encrypt_to,
             *([] if told.how is None else [told.how])]  # fmt: skip
    return (
        all(type(number) is int and -(2**31) <= number < 2**31 for number in numbers)
        and all(type(word) is str and "\0" not in word for word in words)
        and type(told.asked) is bool
        and type(told.deaf) is bool
        and all(each is None or _is_wait(each) for each in (told.grace_s, told.survives_s))
    )


def _is_wait(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST_S  # type: ignore[operator]


def imported(folder: Path, besides: int | None = None) -> bool:
    """Whether a process launched with this folder, but for `besides`, has imported trainckpt."""
    return any(path.name != f"imported-{besides}" for path in folder.glob("imported-*"))


def is_no_script() -> None:
    """This process has imported trainckpt, and is the command of that name: that trains nothing."""
    folder = folder_of_launch()
    if folder is not None:
        with contextlib.suppress(OSError):
            _mark(folder).unlink()


def _mark_import() -> None:
    folder = folder_of_launch()
    if folder is not None:
        with contextlib.suppress(OSError):
            _mark(folder).touch()


def _mark(folder: Path) -> Path:
    return folder / f"imported-{os.getpid()}"


_mark_import()
