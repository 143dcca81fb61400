"""What cases run on: warm servers, hosts, a disk that can go wrong, an object store behind doors.

Each part begins when the first case needs it, and serves all that follow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from tests.campaign import launch
from tests.chaos import disk, late_disk
from tests.chaos.rooms import LATE, MODULES, NO_LINKS, ON_DISK, POOR, S3, TIER
from tests.faults import dead_mount, farm
from tests.faults.troubled_store import TroubledStore
from tests.s3_servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.rooms import Room

MOST_RANKS = 4
POOR_BYTES = "1m"  # less than one arena


class Stage:
    """The parts, and which processes are theirs.

    Attributes:
        folder: Holds everything.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._servers: dict[tuple[str, ...], launch.Server] = {}
        self.memory = folder / "memory"
        self.memory.mkdir(exist_ok=True)
        self._mount("512m", self.memory)

    def server(self, room: Room) -> launch.Server:
        """A process that has loaded what ranks of this room need."""
        modules = MODULES[room.trainer]
        if modules not in self._servers:
            self._servers[modules] = self._stack.enter_context(launch.server(*modules))
        return self._servers[modules]

    def begin(self, room: Room) -> None:
        """Have all parts there that this room needs."""
        self.server(room)
        if room.hosts > 1:
            _ = self.farm
        if room.place in ON_DISK:
            self.disk.without(["link"] if room.place == NO_LINKS else [])
        if room.place == LATE:
            for host in range(room.hosts):
                self._show_late(host)
        if room.place in (S3, TIER):
            _ = self.store

    @cached_property
    def disk(self) -> disk.Mounted:
        place = self.folder / "disk", self.folder / "backing"
        return self._stack.enter_context(disk.mounted(*place))

    @cached_property
    def farm(self) -> farm.Farm:
        _ = self.disk, self.late_folder, self._late_views  # hosts see what is there when they boot
        return self._stack.enter_context(farm.farm(self.folder / "own", MOST_RANKS))

    @cached_property
    def late_folder(self) -> Path:
        """Where each host sees the file server, each by its own view."""
        folder = self.folder / "late"
        folder.mkdir()
        return folder

    @property
    def late_backing(self) -> Path:
        """What lies on the file server."""
        return self.folder / "late-backing"

    @cached_property
    def _late_views(self) -> list[Path]:
        folders = [self.folder / f"late{host}" for host in range(MOST_RANKS)]
        for folder in folders:
            self._stack.enter_context(late_disk.mounted(folder, self.late_backing))
        return folders

    def _show_late(self, host: int) -> None:
        """Let the host see the file server, if it has not since it booted."""
        folder, view = self.late_folder, self._late_views[host]
        holder = str(self.farm.holder(host))
        if str(folder) not in launch.Path(f"/proc/{holder}/mountinfo").read_text().split():
            command = ["nsenter", "-t", holder, "-m", "mount", "--bind", str(view), str(folder)]
            subprocess.run(command, check=True)

    @cached_property
    def store(self) -> TroubledStore:
        return TroubledStore(self.folder / "store", self._stack, doors=MOST_RANKS)

    @property
    def bucket(self) -> Path:
        """What lies in the store, as files."""
        return self.folder / "store" / BUCKET

    @cached_property
    def poor(self) -> Path:
        """A memory that is too small for anything."""
        folder = self.folder / "poor"
        folder.mkdir()
        self._mount(POOR_BYTES, folder)
        return folder

    def memory_of(self, room: Room, host: int) -> Path:
        """Where this host keeps what is in shared memory, as this process sees it."""
        if room.hosts > 1:
            own = str(self.farm.own).lstrip("/")
            return launch.Path(f"/proc/{self.farm.holder(host)}/root/{own}")
        return self.poor if room.place == POOR else self.memory

    def forget(self, room: Room) -> None:
        """Empty every memory: what a failed case has left is not the next one's."""
        for host in range(room.hosts):
            for left in self.memory_of(room, host).glob("trainckpt-*"):
                shutil.rmtree(left, ignore_errors=True)

    def _mount(self, size: str, folder: Path) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", folder]
        subprocess.run(command, check=True)
        self._stack.callback(subprocess.run, ["umount", "-l", folder], check=True)


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """A stage in this folder."""
    with ExitStack() as stack:
        yield Stage(folder, stack)


def cannot_be_made() -> str:
    """Why this machine can hold none, or ""."""
    return dead_mount.why_not() or farm.why_not()


def why_not() -> str:
    """Why this process can make none, or ""."""
    if os.getppid() != 1:
        return "other processes of the machine are to be seen (tests/alone.py)"
    return cannot_be_made()
