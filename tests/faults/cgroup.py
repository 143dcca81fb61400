"""A cgroup with a limit of its own, of either version, where this user may make one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/sys/fs/cgroup")
GONE_WITHIN_S = 30.0


class Group:
    """One group, that ends when nobody is in it any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def peak_bytes(self) -> int:
        """The most that was ever taken in it."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        found = [self.folder / name for name in names if (self.folder / name).exists()]
        return int(found[0].read_text())

    @property
    def num_killed(self) -> int:
        """Processes that the system ended because the group had no more memory."""
        names = ("memory.events", "memory.oom_control")
        found = [self.folder / name for name in names if (self.folder / name).exists()]
        words = dict(line.split() for line in found[0].read_text().splitlines())
        return int(words["oom_kill"])

    def enter(self) -> None:
        """This process is in it from now on, with what it takes from now on."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


def leave(group: Group) -> None:
    """Whoever is in this group is in the one above it from now on."""
    for pid in (group.folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            (group.folder.parent / "cgroup.procs").write_text(pid)


@contextlib.contextmanager
def made(limit_bytes: int) -> Iterator[Group]:
    """A group whose processes may take so much memory, without swap.

    Raises:
        OSError: nobody may make one here.
    """
    version_2 = (_ROOT / "cgroup.controllers").exists()
    parent = _ROOT if version_2 else _ROOT / "memory"
    folder = parent / f"trainckpt-test-{secrets.token_hex(4)}"
    if version_2:
        (parent / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    try:
        name = "memory.max" if version_2 else "memory.limit_in_bytes"
        (folder / name).write_text(str(limit_bytes))
        yield Group(folder)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the group; its last process may not be gone yet."""
    until_s = time.monotonic() + GONE_WITHIN_S
    while True:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
            leave(Group(folder))
            time.sleep(0.05)
        else:
            return


def why_not() -> str:
    """Why none can be made here; "" if one can."""
    try:
        with made(1 << 30) as group:
            group.peak_bytes  # noqa: B018 - it must be there
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except IndexError:
        return "nothing tells the most that was taken in a cgroup"
    return ""
