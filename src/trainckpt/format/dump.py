"""The record of one process dump: what was dumped, where it can be brought back, what was open.

    RUN/dumps/dump~<a>.<q>/     of attempt a, with sequence number q among its snapshots
        images/...              CRIU's, encrypted if the run is
        dump.mac                in other tiers alone: the host's word that it took this dump
        dump.json               its existence is the commit

A dump is restored at most once: the attempt that it becomes names it as its parent.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import strict
from trainckpt.format.digest import is_digest
from trainckpt.format.encryption import Wrapped, wrapped_from_json, wrapped_to_json
from trainckpt.format.names import SnapshotName, check_file_name

DUMPS, IMAGES, RECORD, WORD = "dumps", "images", "dump.json", "dump.mac"
KIND = "dump"
MAX_BYTES = 16_000_000
MAX_PID, MAX_PORT = 2**22, 2**16 - 1
_LATER = {"snapshot": "", "dropped": 0, "ports": []}  # records of older versions lack them
_FOLDER = re.compile(r"dump~([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, order=True)
class DumpName:
    """Names one dump of a run; sorts among the snapshots' names by (attempt, sequence)."""

    attempt: int
    sequence: int

    def __str__(self) -> str:
        return f"dump~{self.attempt}.{self.sequence}"

    @property
    def folder(self) -> str:
        """Path of the dump's folder, relative to the run."""
        return f"{DUMPS}/{self}"

    @property
    def record(self) -> str:
        """Where its record lies."""
        return f"{self.folder}/{RECORD}"

    @property
    def word(self) -> str:
        """Where the host's word for it lies."""
        return f"{self.folder}/{WORD}"

    def image(self, name: str) -> str:
        """Where one of its images lies."""
        return f"{self.folder}/{IMAGES}/{name}"

    @classmethod
    def parse(cls, text: str) -> DumpName | None:
        """The name spelled by `text`, or None if it spells none."""
        match = _FOLDER.fullmatch(text)
        found = cls(int(match[1]), int(match[2])) if match else None
        return found if str(found) == text else None


@dataclass(frozen=True)
class Image:
    """One file of CRIU's: plain name, length, digest; of an encrypted one, as it is stored."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class WrittenFile:
    """A file that the processes had open for writing, and its length then."""

    path: str
    num_bytes: int


@dataclass(frozen=True)
class MappedFile:
    """A file that the processes had mapped for themselves, such as a library, as it was."""

    path: str
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Host:
    """What a dump is tied to.

    Attributes:
        name: Of the host.
        kernel: Its release.
        flags: What its processor can do, sorted.
    """

    name: str
    kernel: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU of the host: its name, its UUID, and what the processes had on it."""

    name: str
    uuid: str
    used_bytes: int


@dataclass(frozen=True)
class GpuState:
    """What lies in the images of the state that processes had on GPUs.

    Attributes:
        driver: NVIDIA's, its version: another one may not put the state back.
        devices: All GPUs that the driver knew, in its order.
        pids: Processes whose state was set aside.
    """

    driver: str
    devices: tuple[Gpu, ...]
    pids: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """On all GPUs."""
        return sum(gpu.used_bytes for gpu in self.devices)


@dataclass(frozen=True)
class DumpRecord:
    """One dump.

    Attributes:
        name: Which.
        run: Id of the run.
        host: Where it was taken.
        criu: Version that took it.
        created: When, in seconds since 1970.
        root: Process id of the tree's root.
        tasks: All ids that have to be free: of processes and threads.
        world: Ranks in it.
        folder: Of the supervisor, which comes back with it.
        told: File name -> text: what ranks had told the supervisor.
        images, written: Files.
        reason: Why it was taken.
        gpus: What was on GPUs; None: nothing.
        mapped: Files that have to be as they were: they are no part of the images.
        snapshot: Full name of the one that holds what the images lack, or "".
        dropped: So many bytes.
        ports: That have to be free as well, if they can be had: of TCP and UDP.
        keys: The key of its images, wrapped for each recipient; none: they are not encrypted.
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
        """Of all images."""
        return sum(image.num_bytes for image in self.images)

    def dump(self) -> bytes:
        """As JSON, with a digest of itself."""
        keys = wrapped_to_json(self.keys)
        return strict.sealed({**asdict(self), "name": str(self.name), "keys": keys, "format": 1})

    @classmethod
    def load(cls, data: bytes, what: str) -> DumpRecord:
        """Read it back; `UnusableSnapshot` if it is not one."""
        body = strict.unsealed(strict.parse(data, what, max_bytes=MAX_BYTES), what)
        name = DumpName.parse(str(strict.field(body, "name", str, what)))
        if name is None:
            raise UnusableSnapshot(f"{what}: {str(body['name'])[:60]!r} names no dump")
        texts = {k: str(strict.field(body, k, str, what))
                 for k in ("run", "criu", "folder", "reason")}  # fmt: skip
        body = {**_LATER, **body}
        snapshot = str(strict.field(body, "snapshot", str, what))
        if snapshot and SnapshotName.parse(snapshot) is None:
            raise UnusableSnapshot(f"{what}: {snapshot[:60]!r} names no snapshot")
        created = body.get("created")
        if not isinstance(created, (int, float)) or isinstance(created, bool):
            raise UnusableSnapshot(f"{what}: created is {str(created)[:60]!r}")
        return cls(
            name=name, created=float(created), root=_pid(body.get("root"), what),
            host=_host(strict.field(body, "host", dict, what), what),
            tasks=tuple(_pid(pid, what) for pid in strict.field(body, "tasks", list, what)),
            world=strict.count(body, "world", what),
            told=_texts(strict.field(body, "told", dict, what), what),
            images=tuple(_image(i, what) for i in strict.field(body, "images", list, what)),
            written=tuple(_written(f, what) for f in strict.field(body, "written", list, what)),
            gpus=_gpus(body.get("gpus"), what),
            mapped=tuple(_mapped(f, what) for f in body.get("mapped") or ()),
            snapshot=snapshot, dropped=strict.count(body, "dropped", what),
            ports=tuple(_port(port, what) for port in strict.field(body, "ports", list, what)),
            keys=wrapped_from_json(body["keys"], what) if body.get("keys") else (), **texts,
        )  # fmt: skip


def _pid(value: Any, what: str) -> int:
    if type(value) is not int or not 0 < value <= MAX_PID:
        raise UnusableSnapshot(f"{what}: {str(value)[:60]!r} is no process")
    return value


def _port(value: Any, what: str) -> int:
    if type(value) is not int or not 0 < value <= MAX_PORT:
        raise UnusableSnapshot(f"{what}: {str(value)[:60]!r} is no port")
    return value


def _host(body: dict[str, Any], what: str) -> Host:
    name, kernel = (str(strict.field(body, key, str, what)) for key in ("name", "kernel"))
    flags = strict.field(body, "flags", list, what)
    return Host(name, kernel, tuple(str(flag) for flag in flags))


def _gpus(body: Any, what: str) -> GpuState | None:
    if body is None:
        return None
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what}: {str(body)[:60]!r} is no state of GPUs")
    devices = strict.field(body, "devices", list, what)
    pids = strict.field(body, "pids", list, what)
    return GpuState(
        str(strict.field(body, "driver", str, what)),
        tuple(_gpu(device, what) for device in devices),
        tuple(_pid(pid, what) for pid in pids),
    )


def _gpu(body: Any, what: str) -> Gpu:
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what}: {str(body)[:60]!r} is no GPU")
    name, uuid = (str(strict.field(body, key, str, what)) for key in ("name", "uuid"))
    return Gpu(name, uuid, strict.count(body, "used_bytes", what))


def _texts(body: dict[str, Any], what: str) -> dict[str, str]:
    """File names that lead nowhere else, and texts."""
    for name, text in body.items():
        check_file_name(name)
        if not isinstance(text, str):
            raise UnusableSnapshot(f"{what}: {name[:60]} holds no text")
    return body


def _image(body: Any, what: str) -> Image:
    if not isinstance(body, dict) or not is_digest(body.get("digest")):
        raise UnusableSnapshot(f"{what}: an image without a digest")
    name = check_file_name(body.get("name"))
    return Image(name, strict.count(body, "num_bytes", what), body["digest"])


def _written(body: Any, what: str) -> WrittenFile:
    return WrittenFile(_path(body, what), strict.count(body, "num_bytes", what))


def _mapped(body: Any, what: str) -> MappedFile:
    path = _path(body, what)
    return MappedFile(path, *(strict.count(body, key, what) for key in ("num_bytes", "changed_ns")))


def _path(body: Any, what: str) -> str:
    path = body.get("path") if isinstance(body, dict) else None
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise UnusableSnapshot(f"{what}: {str(path)[:100]!r} is no path")
    return path
