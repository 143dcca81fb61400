"""Dump a process tree and end it; after a failure before the commit it runs on.

    1. look       what the tree has open, and the free space; nothing is changed yet
       GPUs       GPU state is set aside in the processes' own memory (`gpu_state`)
    2. CRIU       writes images; the tree stays stopped. An encrypted run's images are encrypted
    3. fsync      every image, with its digest, and the folders
    4. commit     the record: from now on the dump exists
    5. end        kill the stopped processes; `await_gone` waits, for a restore needs their ids

A failure before 4 leaves no images. If this process is killed meanwhile, `dump_guard` stands in.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed
from trainckpt.format.digest import digest, digest_blocks
from trainckpt.format.dump import (
    DUMPS,
    IMAGES,
    DumpName,
    DumpRecord,
    Host,
    Image,
    MappedFile,
    WrittenFile,
)
from trainckpt.format.names import SNAPSHOTS, SnapshotName
from trainckpt.process_dump import criu, encrypted_images, ids_and_ports, process_tree
from trainckpt.process_dump.dump_guard import guarded, resume_tree
from trainckpt.process_dump.process_tree import send
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.format.manifest import Wrapped
    from trainckpt.process_dump.gpu_state import GpuTree
    from trainckpt.storage.local import LocalTier

FIRST_S, BYTES_PER_S = 1.5, 250e6  # seen: 440 MB in 0.9 s, 580 MB on a busy machine in 2.4 s
GONE_WITHIN_S, LOOK_EVERY_S = 30.0, 0.01
MOST_REASONS, MOST_FREEZES = 5, 4
DIGEST_BYTES = 64 << 20
DOCTOR_HINT = "`trainckpt doctor` says what this machine can do"


@dataclass(frozen=True)
class DumpOrder:
    """A request for one dump."""

    program: Path  # CRIU
    version: str
    root: int  # process id of the tree's root
    name: DumpName
    run: str
    world: int  # number of ranks in the tree
    folder: Path  # the supervisor's folder; its files are stored in the record
    # files the tree appends to and only the supervisor reads: not cut back on restore
    logs: tuple[Path, ...] = ()
    reason: str = ""
    gpus: GpuTree | None = None
    snapshot: str = ""  # it has the memory left out of the dump
    dropped: int = 0  # bytes left out
    # files that the tree opens for a moment, and the supervisor removes: in no dump
    removed: tuple[Path, ...] = ()
    recipients: tuple[str, ...] = ()  # of encrypted images; empty: no encryption


def next_name(tier: LocalTier, attempt: int) -> DumpName:
    """Return a name later than all snapshots and dumps of this attempt, including those in memory.

    A snapshot copied from memory later, under a greater number, would pass for newer than the dump.
    """
    memory = SharedMemoryDir.found(tier.url)
    in_memory = [] if memory is None else [folder.rpartition("/")[2] for folder in memory.folders()]
    names = [SnapshotName.parse(name) for name in [*tier.list(SNAPSHOTS), *in_memory]]
    dumps = [DumpName.parse(name) for name in tier.list(DUMPS)]
    sequences = [n.sequence for n in [*names, *dumps] if n is not None and n.attempt == attempt]
    return DumpName(attempt, max(sequences, default=0) + 1)


def estimate_s(num_bytes: int, *, encrypts: bool = False) -> float:
    """Return the seconds a dump of so much memory takes, estimated high."""
    return FIRST_S + num_bytes / BYTES_PER_S * (2 if encrypts else 1)  # encrypting writes it again


def take(tier: LocalTier, order: DumpOrder, variable: str) -> DumpRecord:
    """Dump the tree and end it.

    `variable` is set to `order.folder` in the environment of all processes of the launch.

    Raises:
        SaveFailed: the dump failed; the tree runs on.
        GpusLost: it failed, and some processes cannot run on.
        TierUnavailable: the run directory refused; the tree runs on.
    """
    with _as_refusal("it could not be looked at"):
        pids = process_tree.processes(order.root)
        _look(order, pids, variable)
        _must_have_room(tier, pids, order.gpus.state.num_bytes if order.gpus else 0)
    mark, record_path = f"{variable}={order.folder}", tier.root / order.name.record
    tier.make_folder(order.name.folder)
    with contextlib.ExitStack() as stack:
        try:
            with _as_refusal("the dump could not be written"):
                guard = guarded(order.root, mark, record_path, may_go_on=order.gpus is None)
                held = stack.enter_context(guard)
                record, tasks, pids = _write(tier, order, pids, variable, held)
        except BaseException:
            resume_tree(process_tree.processes(order.root))
            with contextlib.suppress(OSError):
                shutil.rmtree(record_path.parent)
            raise
        send(pids, signal.SIGKILL)
    ids_and_ports.pass_over(tasks)
    return record


def _write(
    tier: LocalTier, order: DumpOrder, pids: list[int], variable: str, held: int
) -> tuple[DumpRecord, list[int], list[int]]:
    """Write images and record; return the record, the tasks, and the stopped processes."""
    images = tier.root / order.name.folder / IMAGES
    with _without_gpus(order, pids):
        pids, tree_state = _freeze(order, images, variable, held)
        tasks = process_tree.tasks(pids)
        keys: tuple[Wrapped, ...] = ()
        if order.recipients:
            keys = encrypted_images.encrypt(images, order.run, order.name, order.recipients)
        _sync_written(tree_state)
        record = _record(order, tasks, tree_state, _settle(images), keys)
        tier.replace(order.name.record, record.dump())
    return record, tasks, pids


@contextlib.contextmanager
def _as_refusal(what: str) -> Iterator[None]:
    """Turn the system's errors in the block into `SaveFailed`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SaveFailed(f"{what}: {error}") from error


def await_gone(record: DumpRecord) -> list[int]:
    """Wait up to 30 s until the ids of all dumped tasks are free; return those still in use.

    Ended children of this process are reaped here.
    """
    deadline = time.monotonic() + GONE_WITHIN_S
    while (remaining := process_tree.taken(record.tasks)) and time.monotonic() < deadline:
        for pid in remaining:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(LOOK_EVERY_S)
    return remaining


def _look(order: DumpOrder, pids: list[int], variable: str) -> process_tree.TreeState:
    marked = process_tree.marked(variable, str(order.folder))
    strays = [pid for pid in marked if pid not in pids and pid != os.getpid()]
    tree_state = process_tree.look(pids, strays, besides=[os.getpid()])
    reasons = process_tree.why_not(tree_state, gpus=order.gpus is not None)
    if reasons:
        raise SaveFailed(
            f"the processes cannot be dumped: {'; '.join(reasons[:MOST_REASONS])}",
            hint=DOCTOR_HINT,
        )
    return tree_state


@contextlib.contextmanager
def _without_gpus(order: DumpOrder, pids: list[int]) -> Iterator[None]:
    """Set GPU state aside before the block; put it back only if the block fails."""
    if order.gpus is None:
        yield
        return
    order.gpus.set_aside()
    try:
        yield
    except BaseException:
        resume_tree(pids)  # the driver restores it on a thread of the process
        order.gpus.put_back()
        raise


def _freeze(
    order: DumpOrder, images: Path, variable: str, held: int
) -> tuple[list[int], process_tree.TreeState]:
    """Stop the tree and write its images; return its processes and what they have open.

    A process may be reading a file in /proc of a process outside the tree, for less than a
    millisecond, or a timer may be due. CRIU dumps it and cannot restore it, so the tree runs on and
    is stopped again.
    """
    for _ in range(MOST_FREEZES):
        images.mkdir(mode=0o700)
        if reason := criu.dump(order.program, order.root, images, [held]):
            raise SaveFailed(f"CRIU could not dump the processes: {reason}", hint=DOCTOR_HINT)
        if order.gpus is not None:
            order.gpus.must_live()
        pids = process_tree.processes(order.root)  # some came and went before they were stopped
        tree_state = _look(order, pids, variable)
        removed = {str(path.resolve()) for path in order.removed} & {*tree_state.written()}
        passing = [f"{path} is being written" for path in sorted(removed)]
        if not (reasons := [*tree_state.passing(), *passing]):
            return pids, tree_state
        resume_tree(pids)
        shutil.rmtree(images)
        time.sleep(LOOK_EVERY_S)
    raise SaveFailed(
        f"the processes cannot be dumped: {'; '.join(reasons[:MOST_REASONS])}",
        hint=DOCTOR_HINT,
    )


def _must_have_room(tier: LocalTier, pids: list[int], more: int) -> None:
    needed_bytes = process_tree.memory_bytes(pids) + more
    tier.make_folder(DUMPS)
    free_bytes = shutil.disk_usage(tier.root / DUMPS).free
    if free_bytes < needed_bytes:
        raise SaveFailed(
            f"the dump needs about {needed_bytes >> 20} MB, "
            f"{free_bytes >> 20} MB are free at {tier.url}/{DUMPS}",
            hint="free space there",
        )


def _settle(images: Path) -> tuple[Image, ...]:
    """Sync every image; return the images with their digests."""
    settled = []
    for path in sorted(images.iterdir()):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fchmod(descriptor, 0o600)
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
            settled.append(Image(path.name, size, _digest(descriptor, size)))
        finally:
            os.close(descriptor)
    for folder in (images, images.parent):
        sync(folder)
    return tuple(settled)


_CANNOT_SYNC = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EROFS})


def _sync_written(held: process_tree.TreeState) -> None:
    """Sync all files the tree has written.

    A file shorter after a power cut than in the processes' memory would make the dump useless.
    """
    files = [Path(path) for path in held.written()]
    for path in [*files, *dict.fromkeys(file.parent for file in files)]:
        try:
            sync(path)
        except OSError as error:
            # No permission, or a kind of file without durability: as safe as without a dump.
            if error.errno not in _CANNOT_SYNC:
                raise


def sync(path: Path) -> None:
    """Bring a file or folder to stable storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, size: int) -> str:
    if size == 0:
        return digest(b"")
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
        # In blocks: other threads, such as the heartbeat's, run between two of them.
        return digest_blocks(view[at : at + DIGEST_BYTES] for at in range(0, size, DIGEST_BYTES))


def this_host() -> Host:
    """Return host name, kernel and processor flags: the facts a dump taken here depends on."""
    flags: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                flags = sorted(line.partition(":")[2].split())
                break
    return Host(socket.gethostname(), platform.release(), tuple(flags))


def digest_of(path: Path) -> str:
    """Return the digest of a file, as computed by `take`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _digest(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _record(
    order: DumpOrder,
    tasks: list[int],
    held: process_tree.TreeState,
    images: tuple[Image, ...],
    keys: tuple[Wrapped, ...],
) -> DumpRecord:
    logs = {str(path) for path in order.logs}
    written = [WrittenFile(p, Path(p).stat().st_size) for p in held.written() if p not in logs]
    mapped = []
    for name in process_tree.mapped_files(process_tree.processes(order.root)):
        with contextlib.suppress(OSError):
            status = Path(name).stat()
            mapped.append(MappedFile(name, status.st_size, status.st_mtime_ns))
    return DumpRecord(
        name=order.name,
        run=order.run,
        host=this_host(),
        criu=order.version,
        created=time.time(),
        root=order.root,
        tasks=tuple(tasks),
        world=order.world,
        folder=str(order.folder),
        told={
            path.name: path.read_text(encoding="utf-8", errors="replace")
            for path in order.folder.iterdir()
            if path.is_file() and path not in order.logs
        },
        images=images,
        written=tuple(written),
        reason=order.reason,
        gpus=order.gpus.state if order.gpus is not None else None,
        mapped=tuple(mapped),
        snapshot=order.snapshot,
        dropped=order.dropped,
        read=tuple(held.read()),
        ports=tuple(ids_and_ports.bound(order.root, held.sockets())),
        keys=keys,
    )
