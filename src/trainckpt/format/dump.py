"""Read and write the record of a process dump: its images, open files and host.

    RUN/dumps/dump~<a>.<q>/     of attempt a, with sequence number q among its snapshots
        images/...              CRIU's, encrypted if the run is
        dump.json               its existence is the commit

A dump is restored at most once: the attempt restored from it names it as its parent.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Annotated

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format.digest import is_digest
from trainckpt.format.manifest import Wrapped, wrapped_from_json, wrapped_to_json
from trainckpt.format.names import SnapshotName, check_file_name

DUMPS, IMAGES, RECORD = "dumps", "images", "dump.json"
KIND = "dump"
MAX_BYTES = 16_000_000
MAX_PID, MAX_PORT = 2**22, 2**16 - 1
Pid = Annotated[int, lambda pid: 0 < pid <= MAX_PID]
Port = Annotated[int, lambda port: 0 < port <= MAX_PORT]
Digest = Annotated[str, is_digest]
FileName = Annotated[str, check_file_name]
AbsolutePath = Annotated[str, lambda path: path.startswith("/") and "\0" not in path]
SnapshotText = Annotated[str, lambda text: not text or SnapshotName.parse(text) is not None]
_FOLDER = re.compile(r"dump~([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, order=True)
class DumpName:
    """Name of one dump of a run; sorts among the snapshots' names by (attempt, sequence)."""

    attempt: int
    sequence: int

    def __str__(self) -> str:
        return f"dump~{self.attempt}.{self.sequence}"

    @property
    def folder(self) -> str:
        """Return the path of the dump's folder, relative to the run."""
        return f"{DUMPS}/{self}"

    @property
    def record(self) -> str:
        """Return the path of its record."""
        return f"{self.folder}/{RECORD}"

    def image(self, name: str) -> str:
        """Return the path of one of its images."""
        return f"{self.folder}/{IMAGES}/{name}"

    @classmethod
    def parse(cls, text: str) -> DumpName | None:
        """Return the name spelled by `text`, or None."""
        match = _FOLDER.fullmatch(text)
        found = cls(int(match[1]), int(match[2])) if match else None
        return found if str(found) == text else None


@dataclass(frozen=True)
class Image:
    """One CRIU file: plain name, length, digest; for an encrypted one, as stored."""

    name: FileName
    num_bytes: int
    digest: Digest


@dataclass(frozen=True)
class WrittenFile:
    """A file the processes had open for writing, and its length then."""

    path: AbsolutePath
    num_bytes: int


@dataclass(frozen=True)
class MappedFile:
    """A file the processes had mapped privately, such as a library: length and mtime then."""

    path: AbsolutePath
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Host:
    """The host a dump is tied to.

    Attributes:
        name: Its name.
        kernel: The kernel release.
        flags: The processor's feature flags, sorted.
    """

    name: str
    kernel: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU of the host: name, UUID, and the processes' memory on it."""

    name: str
    uuid: str
    used_bytes: int


@dataclass(frozen=True)
class GpuState:
    """The GPU state in the images.

    Attributes:
        driver: Version of NVIDIA's driver; another version may not restore the state.
        devices: All GPUs known to the driver, in its order.
        pids: Processes with GPU state in the images.
    """

    driver: str
    devices: tuple[Gpu, ...]
    pids: tuple[Pid, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes on all GPUs."""
        return sum(gpu.used_bytes for gpu in self.devices)


@dataclass(frozen=True)
class DumpRecord:
    """One dump.

    Attributes:
        name: The dump's.
        run: Id of the run.
        host: Where it was taken.
        criu: Version of CRIU.
        created: Seconds since 1970.
        root: Process id of the tree's root.
        tasks: Ids that must be free for a restore: of processes and threads.
        world: Ranks in it.
        folder: The supervisor's, restored with it.
        told: File name -> text: the ranks' reports to the supervisor.
        images, written: Files.
        reason: Why it was taken.
        gpus: GPU state; None: there is none.
        mapped: Files that must be unchanged, as the images lack them.
        snapshot: Full name of the snapshot with the memory missing from the images, or "".
        dropped: Bytes of that memory.
        ports: TCP and UDP ports to keep free too, if possible.
        read: Files open for reading alone.
        keys: The images' key, wrapped for each recipient; empty: they are not encrypted.
    """

    name: DumpName
    run: str
    host: Host
    criu: str
    created: float
    root: Pid
    tasks: tuple[Pid, ...]
    world: int
    folder: str
    told: dict[FileName, str]
    images: tuple[Image, ...]
    written: tuple[WrittenFile, ...]
    reason: str
    gpus: GpuState | None = None
    mapped: tuple[MappedFile, ...] = ()
    snapshot: SnapshotText = ""
    dropped: int = 0
    ports: tuple[Port, ...] = ()
    read: tuple[AbsolutePath, ...] = ()
    keys: tuple[Wrapped, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all images."""
        return sum(image.num_bytes for image in self.images)

    def dump(self) -> bytes:
        """Return the record as JSON, with a digest of itself."""
        keys = wrapped_to_json(self.keys)
        return json_io.with_digest(
            {**asdict(self), "name": str(self.name), "keys": keys, "format": 1}
        )

    @classmethod
    def load(cls, data: bytes, what: str) -> DumpRecord:
        """Parse a record; raise `UnusableSnapshot` if it is not one."""
        body = json_io.verify_digest(json_io.parse(data, what, max_bytes=MAX_BYTES), what)
        name = DumpName.parse(str(json_io.field(body, "name", str, what)))
        if name is None:
            raise UnusableSnapshot(f"{what}: {str(body['name'])[:60]!r} names no dump")
        keys = wrapped_from_json(body["keys"], what) if body.get("keys") else ()
        found: DumpRecord = json_io.build(cls, body, what, name=name, keys=keys)
        return found
