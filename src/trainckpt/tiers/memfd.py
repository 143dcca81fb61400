"""Memory without a file system, where /dev/shm is small: a memfd, and a link by which it is found.

    arenas/rank00000.0 -> memfd:<token>@<process>/<descriptor>

No mount limits it, and it lives as long as a process has it open: the holder, at best one that
outlives the ranks. The link is a word for us, not a path for the kernel: whoever follows it opens
the holder's descriptor in /proc, which the same user alone may, and looks for the token in the
memfd's own name, which nobody can change. So neither a number that another process has by now nor
a descriptor that is something else by now is ever taken for it: such a link leads nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "trainckpt-"
_PROC = Path("/proc")
_TARGET = re.compile(r"memfd:([0-9a-f]{32})@([1-9][0-9]{0,9})/([0-9]{1,9})", re.ASCII)
_NO_EXEC = 0x8  # MFD_NOEXEC_SEAL: it holds data; before Linux 6.3 there is no such flag
_SAFE = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Gone(FileNotFoundError):
    """A link whose memory is not there any more."""


class Taken(NamedTuple):
    """Bytes.

    Attributes:
        tmpfs: Of the file system that holds the memory of runs.
        memfd: Beside it.
    """

    tmpfs: int = 0
    memfd: int = 0


class Target(NamedTuple):
    """What a link says.

    Attributes:
        token: In the memfd's name.
        process, descriptor: Who has it open, and as what.
    """

    token: str
    process: int
    descriptor: int

    def __str__(self) -> str:
        return f"memfd:{self.token}@{self.process}/{self.descriptor}"

    @classmethod
    def parse(cls, text: str) -> Target | None:
        """None: that is no such link."""
        found = _TARGET.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3])) if found else None

    @property
    def path(self) -> Path:
        """Where the kernel shows the holder's descriptor."""
        return _PROC / str(self.process) / "fd" / str(self.descriptor)

    @property
    def is_there(self) -> bool:
        """Whether that is what the link was made for, as far as the kernel lets us see."""
        return _name_of(self.path) == PREFIX + self.token


def is_available() -> bool:
    """Whether this system has such memory, and shows who holds it."""
    return hasattr(os, "memfd_create") and (_PROC / "self/fd").is_dir()


def make() -> tuple[int, str]:
    """An empty one of this process: its descriptor and its token.

    Raises:
        OSError: as the system reports it.
    """
    token = secrets.token_hex(16)
    try:
        descriptor = os.memfd_create(PREFIX + token, os.MFD_CLOEXEC | _NO_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create(PREFIX + token, os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor, token


def is_named(descriptor: int, token: str) -> bool:
    """Whether this descriptor of ours is the memfd of that token."""
    return _name_of(_PROC / "self/fd" / str(descriptor)) == PREFIX + token


def open_file(path: Path, flags: int) -> int:
    """Open a file, or the memory that a link of that name stands for.

    Raises:
        Gone: nobody holds that any more.
        OSError: as the system reports it.
    """
    try:
        return os.open(path, flags | _NO_FOLLOW | _SAFE, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    target = read_link(path)
    descriptor = open_held(target, flags) if target is not None else None
    if descriptor is None:
        raise Gone(errno.ENOENT, "nobody holds its memory any more", str(path))
    return descriptor


def read_link(path: Path) -> Target | None:
    """What a link says; None if there is none, or not one of ours."""
    try:
        return Target.parse(os.readlink(path))  # noqa: PTH115 - text, not a path
    except OSError:
        return None


def status_of(path: Path) -> os.stat_result | None:
    """Of a file, or of the memory that a link stands for; None if that is gone.

    Raises:
        OSError: there is neither.
    """
    if not path.is_symlink():
        return path.lstat()
    # Not by opening it: to close any descriptor would give up this process's lock.
    if (target := read_link(path)) is None or not target.is_there:
        return None
    try:
        status = target.path.stat()
    except OSError:
        return None
    return status if target.is_there else None


def is_dead(path: Path) -> bool:
    """Whether it is a link that leads nowhere."""
    with contextlib.suppress(OSError):
        return status_of(path) is None
    return False


def may_be(path: Path, *, link: bool) -> bool:
    """Whether such a link, or a file, may be made or opened there: the other is not in its way."""
    return not os.path.lexists(path) or is_dead(path) or path.is_symlink() == link


def taken_by(paths: Iterable[Path]) -> Taken:
    """By these files and what such links stand for, each of them once whatever names it has."""
    seen: dict[tuple[int, int], Taken] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = status_of(path)
            if status is not None:
                num_bytes = status.st_blocks * 512
                found = Taken(memfd=num_bytes) if path.is_symlink() else Taken(num_bytes)
                seen[status.st_dev, status.st_ino] = found
    return Taken(sum(t.tmpfs for t in seen.values()), sum(t.memfd for t in seen.values()))


def open_held(target: Target, flags: int) -> int | None:
    """Open what another process of this user holds; None if that is not what it was told for."""
    if not target.is_there:  # to open something else might do something
        return None
    try:
        descriptor = os.open(target.path, flags & ~os.O_CREAT | _SAFE)
    except OSError:
        return None
    if is_named(descriptor, target.token) and os.fstat(descriptor).st_uid == os.getuid():
        return descriptor
    os.close(descriptor)  # it was another one by then
    return None


def _name_of(shown: Path) -> str:
    """Of the memfd that /proc shows there, or ""."""
    try:
        text = os.readlink(shown)  # noqa: PTH115 - no path either
    except OSError:
        return ""
    return text.removeprefix("/memfd:").removesuffix(" (deleted)") if "/memfd:" in text else ""
