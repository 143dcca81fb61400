"""A process tree in /proc: its processes, its open files, and the obstacles to a dump.

Reading (`processes`, `tasks`, `look`) is separate from judging (`why_not`, pure). CRIU would refuse
most of these cases too, but late, one at a time, and in its own terms.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

PROC = Path("/proc")
DELETED = " (deleted)"
ESTABLISHED = "01"
GPU_FILES = "/dev/nvidia"
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - compared with, never written to
TIMER, STANDS = "anon_inode:[timerfd]", "(0, 0)"
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SQLITE, SQLITE_SIDES = b"SQLite format 3\0", ("-wal", "-shm", "-journal")
_INODE = re.compile(r"(pipe|socket):\[(\d+)\]")
_PROC_FILE = re.compile(rf"{PROC}/(\d+)/")


@dataclass(frozen=True)
class OpenDescriptor:
    """One descriptor of one process."""

    pid: int
    number: int
    target: str  # as /proc shows it: a path, `pipe:[1234]`, `anon_inode:[eventpoll]`
    flags: int = 0  # flags of `open`
    database: bool = False  # it is a database engine's file
    is_file: bool = False  # it is a regular file with a name
    is_pipe: bool = False  # it is a pipe, with or without a name
    is_due: bool = False  # it is a periodic timer that has expired and was not read since

    @property
    def writes(self) -> bool:
        """Return True if it is open for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


@dataclass(frozen=True)
class TreeState:
    """Open files and connections of a tree."""

    held: tuple[OpenDescriptor, ...] = ()  # its descriptors
    # pipes, and files open for writing, shared with other processes
    outside: frozenset[str] = frozenset()
    strangers: tuple[str, ...] = ()  # peer addresses outside the tree, with the connected process
    strays: tuple[int, ...] = ()  # processes of this launch outside the tree

    def sockets(self) -> frozenset[str]:
        """Return the inodes of its sockets."""
        matches = (_INODE.match(descriptor.target) for descriptor in self.held)
        return frozenset(match[2] for match in matches if match and match[1] == "socket")

    def passing(self) -> list[str]:
        """Return the reasons against a dump of this moment, which CRIU does not see, sorted.

        Files in /proc of processes outside the tree cannot be restored. A periodic timer stands
        still from its expiry until it is read, and CRIU would restore it stopped.
        """
        pids = {each.pid for each in self.held}
        matches = (_PROC_FILE.match(descriptor.target) for descriptor in self.held)
        reads = {match.string for match in matches if match and int(match[1]) not in pids}
        return [
            *(f"{path} is open, of a process outside the command" for path in sorted(reads)),
            *sorted(
                f"process {each.pid}: a periodic timer (timerfd) has expired and was not read"
                for each in self.held
                if each.is_due
            ),
        ]

    def written(self) -> list[str]:
        """Return the paths of its files open for writing, sorted."""
        return sorted({each.target for each in self.held if each.is_file and each.writes})

    def read(self) -> list[str]:
        """Return the paths of its files open for reading alone, sorted."""
        files = {each.target for each in self.held if each.is_file}
        return sorted(files.difference(self.written()))


def why_not(look: TreeState, *, gpus: bool = False) -> list[str]:
    """Return the reasons against dumping such a tree, one sentence each. Pure.

    `gpus`: GPU state will be set aside first.
    """
    reasons = [f"process {pid} has left the tree of the command" for pid in look.strays]
    reasons += [f"a connection outside the command, to {peer}" for peer in look.strangers]
    reasons += [
        f"process {each.pid}: {reason}"
        for each in look.held
        if not (gpus and each.target.startswith(GPU_FILES)) and (reason := _why_not(each, look))
    ]
    return list(dict.fromkeys(reasons))


def _why_not(held: OpenDescriptor, look: TreeState) -> str:
    target = held.target
    if target.startswith("anon_inode:[io_uring]"):
        return "an io_uring is open, which CRIU cannot dump (was it started with --keep-io-uring?)"
    if target.startswith("anon_inode:[userfaultfd]"):
        return "a userfaultfd is open"
    if target.startswith(GPU_FILES):
        return "it holds a GPU"
    if target.startswith("/dev/infiniband"):
        return "it holds an InfiniBand device"
    if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return f"it holds the terminal {target}"
    is_device = target.startswith("/dev/") and not target.startswith(SHARED_MEMORY)
    if is_device and target not in HARMLESS_DEVICES:
        return f"it holds the device {target}"
    if held.is_pipe and target in look.outside:
        return f"a pipe to a process outside the command ({target})"
    if held.is_file and held.writes:
        if held.database:
            return f"{target} is a database, open for writing"
        if target in look.outside:
            return f"{target} is open for writing in another program too"
    return ""


def processes(root: int) -> list[int]:
    """Return the process and all its descendants, parents first."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return [root, *(each.pid for each in psutil.Process(root).children(recursive=True))]
    return [root]


def tasks(pids: Iterable[int]) -> list[int]:
    """Return the ids of all their threads, sorted."""
    thread_ids: list[int] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            thread_ids += [int(entry.name) for entry in (PROC / str(pid) / "task").iterdir()]
    return sorted(thread_ids)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def taken(pids: Iterable[int]) -> list[int]:
    """Return the ids in use by a process or thread now."""
    return [pid for pid in pids if (PROC / str(pid)).exists()]


def marked(name: str, value: str) -> list[int]:
    """Return the living processes started with this environment variable."""
    text = f"{name}={value}".encode()
    pids = []
    for pid in _everybody():
        with contextlib.suppress(OSError):
            if text in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                pids.append(pid)
    return pids


def look(
    pids: Collection[int], strays: Iterable[int] = (), besides: Iterable[int] = ()
) -> TreeState:
    """Return the open files and connections of these processes, and those shared with others.

    Args:
        pids: The tree, its root first.
        strays: See `TreeState`.
        besides: Processes not counted as others.
    """
    held = [each for pid in pids for each in descriptors(pid)]
    names = {each.target for each in held if each.is_pipe or (each.is_file and each.writes)}
    known_pids = {*pids, *besides}
    outside = {
        each.target
        for pid in (_everybody() if names else ())
        if pid not in known_pids
        for each in descriptors(pid, names)
        if each.writes or each.is_pipe
    }
    strangers = _strangers(next(iter(pids), 0), held)
    return TreeState(tuple(held), frozenset(outside), tuple(strangers), tuple(strays))


def descriptors(pid: int, only: Collection[str] | None = None) -> Iterator[OpenDescriptor]:
    """Yield the descriptors of a process; with `only`, just those with these targets."""
    folder = PROC / str(pid) / "fd"
    try:
        numbers = os.listdir(folder)  # noqa: PTH208 - thousands of them
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            target = os.readlink(folder / number)  # noqa: PTH115 - text, not a path
            if only is None or target in only:
                info = (PROC / str(pid) / "fdinfo" / number).read_text(encoding="utf-8")
                line = next(line for line in info.splitlines() if line.startswith("flags:"))
                mode, flags = _mode(target), int(line.split()[1], 8)
                is_file = stat.S_ISREG(mode)
                writes = flags & os.O_ACCMODE != os.O_RDONLY
                yield OpenDescriptor(
                    pid,
                    int(number),
                    target,
                    flags=flags,
                    database=is_file and writes and _is_database(Path(target)),
                    is_file=is_file,
                    is_pipe=target.startswith("pipe:") or stat.S_ISFIFO(mode),
                    is_due=target == TIMER and _is_due(info),
                )


def _is_due(info: str) -> bool:
    facts = dict(line.split(": ", 1) for line in info.splitlines() if ": " in line)
    is_periodic = facts.get("it_interval", STANDS) != STANDS
    return is_periodic and facts.get("it_value") == STANDS


def _mode(target: str) -> int:
    """Return the mode of the file with this name; 0 without one."""
    if target.startswith("/"):
        with contextlib.suppress(OSError):
            return Path(target).stat().st_mode
    return 0


def mapped_files(pids: Iterable[int]) -> list[str]:
    """Return the paths of files these processes have mapped privately, mostly libraries; sorted.

    Shared mappings may be written by the processes, and devices are not files; both are left out.
    """
    paths = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            text = (PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                fields = line.split(maxsplit=5)
                is_own = len(fields) == 6 and fields[1].endswith("p") and fields[4] != "0"
                if is_own and not fields[5].endswith(DELETED):
                    paths.add(fields[5])
    return sorted(path for path in paths if path.startswith("/") and not path.startswith("/dev/"))


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the approximate size of a dump of these processes: their memory, shared or not."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            rollup = (PROC / str(pid) / "smaps_rollup").read_text(encoding="utf-8")
            facts = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
            total += sum(int(facts.get(key, "0").split()[0]) << 10 for key in ("Pss", "Swap"))
    return total


def socket_rows(pid: int | str, tables: Iterable[str]) -> Iterator[list[str]]:
    """Yield the fields of each row in these tables of a process's network namespace, as "tcp6"."""
    for table in tables:
        with contextlib.suppress(OSError):
            text = (PROC / str(pid) / "net" / table).read_text(encoding="ascii")
            yield from (line.split() for line in text.splitlines()[1:])


def _strangers(root: int, held: Iterable[OpenDescriptor]) -> list[str]:
    inodes = {match[2]: each.pid for each in held if (match := _INODE.match(each.target))}
    pairs = {  # (local, remote) address -> inode
        (_bare(fields[1]), _bare(fields[2])): fields[9]
        for fields in (socket_rows(root, ("tcp", "tcp6")) if inodes else ())
        if fields[3] == ESTABLISHED
    }
    return [
        f"{_shown(remote)} (process {inodes[inode]})"
        for (local, remote), inode in pairs.items()
        if inode in inodes and pairs.get((remote, local)) not in inodes
    ]


def _bare(address: str) -> str:
    """Return an address in one form, whether its IPv4 host is on an IPv4 or IPv6 socket."""
    host, _, port = address.partition(":")
    return f"{host[24:] if host.startswith('0' * 16 + 'FFFF0000') else host}:{port}"


def _shown(address: str) -> str:
    host, _, port = address.partition(":")
    if len(host) == 8:
        host = ".".join(str(part) for part in reversed(bytes.fromhex(host)))
    return f"{host}:{int(port, 16)}"


def _is_database(path: Path) -> bool:
    if path.name.endswith(SQLITE_SIDES) or path.suffix == ".mdb":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def _everybody() -> list[int]:
    return [int(entry.name) for entry in PROC.glob("[0-9]*")]
