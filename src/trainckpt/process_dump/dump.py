"""Takes a dump of a tree of processes and ends them; if anything is against it, they go on.

    1. look       what the tree holds open, whether there is room; nothing is touched yet
       GPUs       what is on them is set aside, in the processes' own memory (`gpu_tree`)
    2. CRIU       images; the tree stays, stopped. Of a run that is encrypted, so are they
    3. fsync      every image and its digest, the folders
    4. commit     the record: from now on the dump exists
    5. end        the stopped processes are killed, and awaited: their numbers have to be free

Whatever fails before 4 lets the tree go on where it was, and leaves no images.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed
from trainckpt.format.digest import digest
from trainckpt.format.dump import (
    DUMPS,
    IMAGES,
    DumpName,
    DumpRecord,
    Image,
    MappedFile,
    WrittenFile,
)  # fmt: skip
from trainckpt.format.names import SNAPSHOTS, SnapshotName
from trainckpt.process_dump import criu, numbers, ports, sealed_images, tree
from trainckpt.process_dump.host import this_host
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainckpt.format.encryption import Wrapped
    from trainckpt.process_dump.gpu_tree import GpuTree
    from trainckpt.tiers.local import LocalTier

FIRST_S, BYTES_PER_S = 1.5, 250e6  # seen: 440 MB in 0.9 s, 580 MB on a busy machine in 2.4 s
GONE_WITHIN_S, LOOK_EVERY_S = 30.0, 0.01
MOST_REASONS = 5
SNAPSHOT_STANDS = "`trainckpt doctor` says what this machine can do"


@dataclass(frozen=True)
class Order:
    """What to dump.

    Attributes:
        program, version: CRIU.
        root: The tree's root.
        name, run: Of the dump.
        world: Ranks in the tree.
        folder: The supervisor's; what stands in it is kept with the record.
        logs: Files that the tree appends to and that the supervisor alone reads: not cut back.
        reason: Why.
        gpus: What the tree has on GPUs, if anything.
        snapshot, dropped: What the memory lacks, as of a record.
        recipients: To whom the images are encrypted; none: they are not.
    """

    program: Path
    version: str
    root: int
    name: DumpName
    run: str
    world: int
    folder: Path
    logs: tuple[Path, ...] = ()
    reason: str = ""
    gpus: GpuTree | None = None
    snapshot: str = ""
    dropped: int = 0
    recipients: tuple[str, ...] = ()


def next_name(tier: LocalTier, attempt: int) -> DumpName:
    """The name after all snapshots and dumps of this attempt, in memory too.

    A snapshot that is copied from there later, under a greater number, would pass for newer.
    """
    memory = MemoryPlace.found(tier.url)
    in_memory = [] if memory is None else [folder.rpartition("/")[2] for folder in memory.folders()]
    names = [SnapshotName.parse(name) for name in [*tier.list(SNAPSHOTS), *in_memory]]
    dumps = [DumpName.parse(name) for name in tier.list(DUMPS)]
    used = [n.sequence for n in [*names, *dumps] if n is not None and n.attempt == attempt]
    return DumpName(attempt, max(used, default=0) + 1)


def estimate_s(num_bytes: int, *, encrypts: bool = False) -> float:
    """How long a dump of so much memory takes, rather too long than too short."""
    return FIRST_S + num_bytes / BYTES_PER_S * (2 if encrypts else 1)  # it is written twice


def take(tier: LocalTier, order: Order, variable: str) -> DumpRecord:
    """Dump the tree and end it.

    Args:
        tier: The run's place.
        order: What, and as which dump.
        variable: Environment variable that marks the launch with `order.folder`.

    Raises:
        SaveFailed: it cannot be dumped, and goes on.
        GpusLost: nor can all of it go on.
        TierUnavailable: the place refused; it goes on.
    """
    with _as_refusal("it could not be looked at"):
        pids = tree.processes(order.root)
        held = _look(order, pids, variable)
        _must_have_room(tier, pids, order.gpus.state.num_bytes if order.gpus else 0)
    images = tier.root / order.name.folder / IMAGES
    tier.make_folder(order.name.folder)
    try:
        with _as_refusal("the dump could not be written"), _without_gpus(order, pids):
            images.mkdir(mode=0o700)
            _freeze(order, images)
            pids = tree.processes(order.root)  # some may have come and gone until they were stopped
            held, tasks = _look(order, pids, variable), tree.tasks(pids)
            keys = _seal(order, images)
            _keep_written(held)
            record = _record(order, tasks, held, _settle(images), keys)
            tier.replace(order.name.record, record.dump())
    except BaseException:
        _send(tree.processes(order.root), signal.SIGCONT)
        with contextlib.suppress(OSError):
            shutil.rmtree(tier.root / order.name.folder)
        raise
    _send(pids, signal.SIGKILL)
    numbers.pass_over(tasks)
    return record


@contextlib.contextmanager
def _as_refusal(what: str) -> Iterator[None]:
    """Whatever the system says against it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SaveFailed(f"{what}: {error}") from error


def await_gone(record: DumpRecord) -> list[int]:
    """Wait until the numbers of all dumped tasks are free; those that are not after 30 s.

    Of those that have become children of this process it is this one that has to take note.
    """
    until = time.monotonic() + GONE_WITHIN_S
    while (left := tree.taken(record.tasks)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(LOOK_EVERY_S)
    return left


def _look(order: Order, pids: list[int], variable: str) -> tree.Look:
    marked = tree.marked(variable, str(order.folder))
    strays = [pid for pid in marked if pid not in pids and pid != os.getpid()]
    seen = tree.look(pids, strays, besides=[os.getpid()])
    reasons = tree.why_not(seen, gpus=order.gpus is not None)
    if reasons:
        raise SaveFailed(
            f"the processes cannot be dumped: {'; '.join(reasons[:MOST_REASONS])}",
            hint=SNAPSHOT_STANDS,
        )
    return seen


@contextlib.contextmanager
def _without_gpus(order: Order, pids: list[int]) -> Iterator[None]:
    """What is on GPUs is set aside while the block runs, and stays so unless that fails."""
    if order.gpus is None:
        yield
        return
    order.gpus.set_aside()
    try:
        yield
    except BaseException:
        _send(pids, signal.SIGCONT)  # the thread that restores it is one of theirs
        order.gpus.put_back()
        raise


def _must_have_room(tier: LocalTier, pids: list[int], more: int) -> None:
    needed = tree.memory_bytes(pids) + more
    tier.make_folder("")
    free = shutil.disk_usage(tier.root).free
    if free < needed:
        raise SaveFailed(
            f"the dump needs about {needed >> 20} MB, {free >> 20} MB are free at {tier.url}",
            hint="free space there",
        )


def _freeze(order: Order, images: Path) -> None:
    if why := criu.dump(order.program, order.root, images):
        raise SaveFailed(f"CRIU could not dump the processes: {why}", hint=SNAPSHOT_STANDS)
    if order.gpus is not None:
        order.gpus.must_live()


def _seal(order: Order, images: Path) -> tuple[Wrapped, ...]:
    if not order.recipients:
        return ()
    return sealed_images.seal(images, order.run, order.name, order.recipients)


def _settle(images: Path) -> tuple[Image, ...]:
    """Every image on stable storage, with its digest."""
    found = []
    for path in sorted(images.iterdir()):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fchmod(descriptor, 0o600)
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
            found.append(Image(path.name, size, _digest(descriptor, size)))
        finally:
            os.close(descriptor)
    for folder in (images, images.parent):
        _sync(folder)
    return tuple(found)


_CANNOT_SYNC = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EROFS})


def _keep_written(held: tree.Look) -> None:
    """What the tree has written, on stable storage: a file that is shorter after a power cut than
    the processes remember makes the dump useless.
    """
    files = [Path(path) for path in held.written()]
    for path in [*files, *dict.fromkeys(file.parent for file in files)]:
        try:
            _sync(path)
        except OSError as error:
            # Not ours to open, or of a kind that cannot be made durable: as without a dump.
            if error.errno not in _CANNOT_SYNC:
                raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, size: int) -> str:
    if size == 0:
        return digest(b"")
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory, \
            memoryview(memory) as view:  # fmt: skip
        return digest(view)


def digest_of(path: Path) -> str:
    """Digest of a file, as `take` computes it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _digest(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _record(
    order: Order, tasks: list[int], held: tree.Look, images: tuple[Image, ...],
    keys: tuple[Wrapped, ...],
) -> DumpRecord:  # fmt: skip
    logs = {str(path) for path in order.logs}
    written = [WrittenFile(p, Path(p).stat().st_size) for p in held.written() if p not in logs]
    told = {}
    for path in order.folder.iterdir():
        if path.is_file() and path not in order.logs:
            told[path.name] = path.read_text(encoding="utf-8", errors="replace")
    return DumpRecord(
        name=order.name, run=order.run, host=this_host(), criu=order.version,
        created=time.time(), root=order.root, tasks=tuple(tasks), world=order.world,
        folder=str(order.folder), told=told, images=images, written=tuple(written),
        reason=order.reason, gpus=order.gpus.state if order.gpus is not None else None,
        mapped=tuple(_mapped(tree.processes(order.root))),
        snapshot=order.snapshot, dropped=order.dropped,
        ports=tuple(ports.bound(order.root, held.sockets())), keys=keys,
    )  # fmt: skip


def _mapped(pids: Iterable[int]) -> Iterator[MappedFile]:
    for path in tree.mapped_files(pids):
        with contextlib.suppress(OSError):
            found = Path(path).stat()
            yield MappedFile(path, found.st_size, found.st_mtime_ns)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
