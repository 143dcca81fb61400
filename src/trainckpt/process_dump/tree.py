"""A tree of processes as /proc shows it: who belongs to it, what it holds open, what that forbids.

Reading is one thing (`processes`, `tasks`, `look`), judging another (`why_not`, pure): CRIU would
refuse most of it too, but late, one at a time, and in its own words.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

PROC = Path("/proc")
DELETED = " (deleted)"
ESTABLISHED = "01"
GPU_FILES = "/dev/nvidia"
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - nothing is made there
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SQLITE, SQLITE_SIDES = b"SQLite format 3\0", ("-wal", "-shm", "-journal")
_INODE = re.compile(r"(pipe|socket):\[(\d+)\]")


@dataclass(frozen=True)
class Held:
    """One descriptor of one process.

    Attributes:
        target: As /proc shows it: a path, `pipe:[1234]`, `anon_inode:[eventpoll]`.
        flags: As `open` was given them.
        database: A file that a database engine looks after.
        is_file: A regular file that has a name.
        is_pipe: With a name or without.
    """

    pid: int
    number: int
    target: str
    flags: int = 0
    database: bool = False
    is_file: bool = False
    is_pipe: bool = False

    @property
    def writes(self) -> bool:
        """Open for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


@dataclass(frozen=True)
class Look:
    """What a tree holds.

    Attributes:
        held: Its descriptors.
        outside: Targets that other processes have open: pipes, and files for writing.
        strangers: Addresses of peers that are not in the tree, and which process is connected.
        strays: Processes of this launch that left the tree.
    """

    held: tuple[Held, ...] = ()
    outside: frozenset[str] = frozenset()
    strangers: tuple[str, ...] = ()
    strays: tuple[int, ...] = ()

    def sockets(self) -> frozenset[str]:
        """Inodes of its sockets."""
        found = (_INODE.match(each.target) for each in self.held)
        return frozenset(match[2] for match in found if match and match[1] == "socket")

    def written(self) -> list[str]:
        """Paths of the files that it has open for writing."""
        return sorted({each.target for each in self.held if each.is_file and each.writes})


def why_not(look: Look, *, gpus: bool = False) -> list[str]:
    """Why such a tree cannot be dumped: one sentence each, none if it can. Pure.

    Args:
        look: What it holds.
        gpus: What it has on GPUs is set aside before.
    """
    found = [f"process {pid} has left the tree of the command" for pid in look.strays]
    found += [f"a connection outside the command, to {peer}" for peer in look.strangers]
    held = [each for each in look.held if not (gpus and each.target.startswith(GPU_FILES))]
    found += [f"process {each.pid}: {why}" for each in held if (why := _why_not(each, look))]
    return list(dict.fromkeys(found))


def _why_not(held: Held, look: Look) -> str:
    target = held.target
    if target.startswith("anon_inode:[io_uring]"):
        return "an io_uring is open, which CRIU cannot dump (was it started with --keep-io-uring?)"
    if target.startswith("anon_inode:[userfaultfd]"):
        return "a userfaultfd is open, as after a resume until its first boundary"
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
    """The process and all that descend from it, parents first."""
    families: dict[int, list[int]] = {}
    for pid in _everybody():
        families.setdefault(_parent(pid), []).append(pid)
    found, queue = [], [root]
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue += families.get(pid, [])
    return found


def tasks(pids: Iterable[int]) -> list[int]:
    """Ids of all their threads."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += [int(entry.name) for entry in (PROC / str(pid) / "task").iterdir()]
    return sorted(found)


def taken(pids: Iterable[int]) -> list[int]:
    """Those of these ids that some process or thread has now."""
    return [pid for pid in pids if (PROC / str(pid)).exists()]


def marked(name: str, value: str) -> list[int]:
    """Living processes that were started with this variable."""
    text = f"{name}={value}".encode()
    found = []
    for pid in _everybody():
        with contextlib.suppress(OSError):
            if text in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def look(pids: Collection[int], strays: Iterable[int] = (), besides: Iterable[int] = ()) -> Look:
    """What these processes hold, and what of it others hold.

    Args:
        pids: The tree.
        strays: See `Look`.
        besides: Processes that do not count as others.
    """
    held = [each for pid in pids for each in descriptors(pid)]
    names = {each.target for each in held if each.is_pipe or (each.is_file and each.writes)}
    inside = {*pids, *besides}
    outside = {
        each.target for pid in (_everybody() if names else ()) if pid not in inside
        for each in descriptors(pid, names) if each.writes or each.is_pipe
    }  # fmt: skip
    return Look(tuple(held), frozenset(outside), tuple(_strangers(pids, held)), tuple(strays))


def descriptors(pid: int, only: Collection[str] | None = None) -> Iterator[Held]:
    """The descriptors of a process; with `only`, those of these targets."""
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
                flags = int(next(line for line in info.splitlines()
                                 if line.startswith("flags:")).split()[1], 8)  # fmt: skip
                kind = _mode(target)
                is_file = stat.S_ISREG(kind)
                is_pipe = target.startswith("pipe:") or stat.S_ISFIFO(kind)
                writes = flags & os.O_ACCMODE != os.O_RDONLY
                base = is_file and writes and _is_database(Path(target))
                yield Held(pid, int(number), target, flags, base, is_file, is_pipe)


def _mode(target: str) -> int:
    """Of the file of this name; 0 if there is none."""
    if target.startswith("/"):
        with contextlib.suppress(OSError):
            return Path(target).stat().st_mode
    return 0


def mapped_files(pids: Iterable[int]) -> list[str]:
    """Paths of the files that these processes have mapped for themselves: libraries, most of all.

    What they map to share it may be written by them, and devices are no files.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            text = (PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                fields = line.split(maxsplit=5)
                is_own = len(fields) == 6 and fields[1].endswith("p") and fields[4] != "0"
                if is_own and not fields[5].endswith(DELETED):
                    found.add(fields[5])
    return sorted(path for path in found if path.startswith("/") and not path.startswith("/dev/"))


def memory_bytes(pids: Iterable[int]) -> int:
    """What a dump of these processes will hold, about: their own memory, shared or not."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            rollup = (PROC / str(pid) / "smaps_rollup").read_text(encoding="utf-8")
            facts = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
            total += sum(
                int(facts[key].split()[0]) << 10 for key in ("Pss", "Swap") if key in facts
            )
    return total


@dataclass
class _Net:
    """TCP connections of one network namespace: (local, remote) -> inode."""

    pairs: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, pid: int) -> _Net:
        pairs = {}
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                lines = (PROC / str(pid) / "net" / name).read_text(encoding="utf-8").splitlines()
                for line in lines[1:]:
                    fields = line.split()
                    if fields[3] == ESTABLISHED:
                        pairs[_bare(fields[1]), _bare(fields[2])] = fields[9]
        return cls(pairs)


def _strangers(pids: Iterable[int], held: Iterable[Held]) -> list[str]:
    inodes = {match[2]: each.pid for each in held if (match := _INODE.match(each.target))}
    root = next(iter(pids), None)
    pairs = _Net.of(root).pairs if root is not None and inodes else {}
    return [
        f"{_shown(remote)} (process {inodes[inode]})" for (local, remote), inode in pairs.items()
        if inode in inodes and pairs.get((remote, local)) not in inodes
    ]  # fmt: skip


def _bare(address: str) -> str:
    """IPv4 addresses alike, whether a socket of version 4 or 6 has them."""
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


def _parent(pid: int) -> int:
    try:
        # A name is cut at 15 bytes, and may be no text at all.
        told = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    return int(told.rpartition(")")[2].split()[1])
