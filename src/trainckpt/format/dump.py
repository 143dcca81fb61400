"""Read and write the record of a process dump: its images, open files and host.

    RUN/dumps/dump~<a>.<q>/     of attempt a, with sequence number q among its snapshots
        images/...              CRIU's, encrypted if the run is
        dump.json               its existence is the commit

A dump is restored at most once: the attempt restored from it names it as its parent.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format.digest import is_digest
from trainckpt.format.manifest import Wrapped, wrapped_from_json, wrapped_to_json
from trainckpt.format.names import SnapshotName, check_file_name

DUMPS, IMAGES, RECORD = "dumps", "images", "dump.json"
KIND = "dump"
MAX_BYTES = 16_000_000
MAX_PID, MAX_PORT = 2**22, 2**16 - 1
_LATER = {"snapshot": "", "dropped": 0, "ports": []}  # records of older versions lack them
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

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class WrittenFile:
    """A file the processes had open for writing, and its length then."""

    path: str
    num_bytes: int


@dataclass(frozen=True)
class MappedFile:
    """A file the processes had mapped privately, such as a library: length and mtime then."""

    path: str
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
    pids: tuple[int, ...]

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
        keys: The images' key, wrapped for each recipient; empty: they are not encrypted.
    """

    name: DumpName
    run: str
    host: Host
    criu: str
    created: float
    root: int
    tasks: tuple[int, ...]
    world: int
    folder: str
    told: dict[str, str]
    images: tuple[Image, ...]
    written: tuple[WrittenFile, ...]
    reason: str
    gpus: GpuState | None = None
    mapped: tuple[MappedFile, ...] = ()
    snapshot: str = ""
    dropped: int = 0
    ports: tuple[int, ...] = ()
    keys: tuple[Wrapped, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all images."""
        return sum(image.num_bytes for image in self.images)

    def dump(self) -> bytes:
        """Return the record as JSON, with a digest of itself."""
        keys = wrapped_to_json(self.keys)
        return json_io.sealed({**asdict(self), "name": str(self.name), "keys": keys, "format": 1})

    @classmethod
    def load(cls, data: bytes, what: str) -> DumpRecord:
        """Parse a record; raise `UnusableSnapshot` if it is not one."""
        body = json_io.unsealed(json_io.parse(data, what, max_bytes=MAX_BYTES), what)
        name = DumpName.parse(str(json_io.field(body, "name", str, what)))
        if name is None:
            raise UnusableSnapshot(f"{what}: {str(body['name'])[:60]!r} names no dump")
        texts = {
            k: str(json_io.field(body, k, str, what)) for k in ("run", "criu", "folder", "reason")
        }
        body = {**_LATER, **body}
        snapshot = str(json_io.field(body, "snapshot", str, what))
        if snapshot and SnapshotName.parse(snapshot) is None:
            raise UnusableSnapshot(f"{what}: {snapshot[:60]!r} names no snapshot")
        created = body.get("created")
        if not isinstance(created, (int, float)) or isinstance(created, bool):
            raise UnusableSnapshot(f"{what}: created is {str(created)[:60]!r}")
        return cls(
            name=name,
            created=float(created),
            root=_pid(body.get("root"), what),
            host=_host(json_io.field(body, "host", dict, what), what),
            tasks=tuple(_pid(pid, what) for pid in json_io.field(body, "tasks", list, what)),
            world=json_io.count(body, "world", what),
            told=_texts(json_io.field(body, "told", dict, what), what),
            images=tuple(_image(i, what) for i in json_io.field(body, "images", list, what)),
            written=tuple(_written(f, what) for f in json_io.field(body, "written", list, what)),
            gpus=_gpus(body.get("gpus"), what),
            mapped=tuple(_mapped(f, what) for f in body.get("mapped") or ()),
            snapshot=snapshot,
            dropped=json_io.count(body, "dropped", what),
            ports=tuple(_port(port, what) for port in json_io.field(body, "ports", list, what)),
            keys=wrapped_from_json(body["keys"], what) if body.get("keys") else (),
            **texts,
        )


def _pid(value: Any, what: str) -> int:
    if type(value) is not int or not 0 < value <= MAX_PID:
        raise UnusableSnapshot(f"{what}: {str(value)[:60]!r} is no process")
    return value


def _port(value: Any, what: str) -> int:
    if type(value) is not int or not 0 < value <= MAX_PORT:
        raise UnusableSnapshot(f"{what}: {str(value)[:60]!r} is no port")
    return value


def _host(body: dict[str, Any], what: str) -> Host:
    name, kernel = (str(json_io.field(body, key, str, what)) for key in ("name", "kernel"))
    flags = json_io.field(body, "flags", list, what)
    return Host(name, kernel, tuple(str(flag) for flag in flags))


def _gpus(body: Any, what: str) -> GpuState | None:
    if body is None:
        return None
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what}: {str(body)[:60]!r} is no state of GPUs")
    devices = json_io.field(body, "devices", list, what)
    pids = json_io.field(body, "pids", list, what)
    return GpuState(
        str(json_io.field(body, "driver", str, what)),
        tuple(_gpu(device, what) for device in devices),
        tuple(_pid(pid, what) for pid in pids),
    )


def _gpu(body: Any, what: str) -> Gpu:
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what}: {str(body)[:60]!r} is no GPU")
    name, uuid = (str(json_io.field(body, key, str, what)) for key in ("name", "uuid"))
    return Gpu(name, uuid, json_io.count(body, "used_bytes", what))


def _texts(body: dict[str, Any], what: str) -> dict[str, str]:
    """Check that keys are plain file names, and values texts."""
    for name, text in body.items():
        check_file_name(name)
        if not isinstance(text, str):
            raise UnusableSnapshot(f"{what}: {name[:60]} holds no text")
    return body


def _image(body: Any, what: str) -> Image:
    if not isinstance(body, dict) or not is_digest(body.get("digest")):
        raise UnusableSnapshot(f"{what}: an image without a digest")
    name = check_file_name(body.get("name"))
    return Image(name, json_io.count(body, "num_bytes", what), body["digest"])


def _written(body: Any, what: str) -> WrittenFile:
    return WrittenFile(_path(body, what), json_io.count(body, "num_bytes", what))


def _mapped(body: Any, what: str) -> MappedFile:
    path = _path(body, what)
    return MappedFile(
        path, *(json_io.count(body, key, what) for key in ("num_bytes", "changed_ns"))
    )


def _path(body: Any, what: str) -> str:
    path = body.get("path") if isinstance(body, dict) else None
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise UnusableSnapshot(f"{what}: {str(path)[:100]!r} is no path")
    return path
