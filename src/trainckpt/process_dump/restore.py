"""Restore a dumped process tree, once. The reverse of `dump`.

    examined      changes nothing: after a refusal the dump may be tried again
      1. refusals   host, kernel, processor, CRIU, GPUs, changed libraries, process ids in use
      2. images     every length and digest; encrypted images are decrypted
      3. files      written by the tree still exist and are long enough
    bring_back
      4. files      are cut back to their old length; newer bytes are first copied aside
                    (`<file>.after-<attempt>`, on stable storage)
      5. folder     the supervisor's, with the ranks' reports
      6. CRIU       the tree exists again, its root a child of this process, not running yet
      7. claim      the dump is used up
      8. CRIU       the tree runs
      9. GPUs       GPU state is put back; until then processes wait in CUDA calls

A failed restore leaves no process of the tree. Before the claim nothing of the tree has run, so the
dump may be tried again. If an id or port of the tree is in use, this module waits and runs CRIU
again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.dump import DUMPS, IMAGES, MAX_BYTES, DumpName, DumpRecord
from trainckpt.process_dump import criu, encrypted_images, gpu_state, ids_and_ports, process_tree
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.dump import (
    GONE_WITHIN_S,
    LOOK_EVERY_S,
    await_gone,
    digest_of,
    sync,
    this_host,
)
from trainckpt.process_dump.gpu_state import GpusLost
from trainckpt.storage.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from typing import BinaryIO

    from trainckpt.format.dump import Host, Image, WrittenFile
    from trainckpt.process_dump.gpu_state import GpuTree
    from trainckpt.storage.base import Readable
    from trainckpt.storage.local import LocalTier

VARIABLE = "TRAINCKPT_SUPERVISOR"  # marks the processes of one launch
COPY_BYTES = 1 << 20
MOST_NAMED = 5
QUIET_ROUNDS = 2  # a process may be starting while they are listed


def load(tier: Readable, run: str, name: DumpName) -> DumpRecord:
    """Return the record of one dump, checked against its run and name.

    Raises:
        UnusableSnapshot: missing, damaged, of another run, or of another dump.
    """
    record = DumpRecord.load(tier.read(name.record, max_bytes=MAX_BYTES), name.record)
    if record.run != run:
        raise UnusableSnapshot(f"{name.record} belongs to another run ({record.run[:40]})")
    if record.name != name:
        raise UnusableSnapshot(f"{name.record} is the record of {record.name}")
    return record


def names_in(tier: Readable) -> list[DumpName]:
    """Return the names of all committed dumps, newest first."""
    parsed = map(DumpName.parse, tier.list(DUMPS))
    return sorted((n for n in parsed if n is not None and _has_record(tier, n)), reverse=True)


def _has_record(tier: Readable, name: DumpName) -> bool:
    try:
        return tier.size(name.record) is not None
    except UnusableSnapshot:  # no file: one dump is unusable, as `load` says, and not all of them
        return True


def why_not(record: DumpRecord, host: Host) -> str:
    """Return the reason against a restore on a host, or "". Pure."""
    recorded_host = record.host
    if recorded_host.name != host.name:
        return f"it was taken on {recorded_host.name}, this is {host.name}"
    if recorded_host.kernel != host.kernel:
        return f"it was taken under the kernel {recorded_host.kernel}, this is {host.kernel}"
    if missing := sorted({*recorded_host.flags} - {*host.flags}):
        return f"this processor lacks {', '.join(missing[:MOST_NAMED])}"
    return ""


def why_changed(record: DumpRecord) -> str:
    """Return a sentence about a changed library or other mapped or open file; "" if none changed.

    CRIU compares only sizes and any build ids. A file replaced at the same size would give the
    processes other code; CRIU would open a pipe in place of one, and wait for its other end.
    """
    for file in record.mapped:
        try:
            status = Path(file.path).stat()
        except OSError:
            return f"{file.path}, which was mapped, is gone"
        if (status.st_size, status.st_mtime_ns) != (file.num_bytes, file.changed_ns):
            return f"{file.path}, which was mapped, has changed since"
    for path in record.read:
        with contextlib.suppress(OSError):  # CRIU names a missing one
            if not stat.S_ISREG(Path(path).stat().st_mode):
                return f"{path}, which was open, is no file any more"
    return ""


class RestoreBlocked(UnusableSnapshot):
    """The restore was refused before the tree ran; it may succeed once the obstacle is gone."""


@dataclass(frozen=True)
class RestorableDump:
    """A dump without a known obstacle to its restore."""

    record: DumpRecord
    program: Path  # CRIU
    images: Path  # folder with the images, verified and decrypted
    gpus: GpuTree | None  # GPU state to put back

    def bring_back(
        self,
        attempt: int,
        claim: Callable[[], Mapping[str, str]],
        held: Iterable[int] = (),
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Restore it as another attempt of its run.

        Args:
            attempt: Expected number of the new attempt, in the names of files copied aside.
            claim: Called once the whole tree exists, before any of it runs. Returns file name ->
                text of further files for the supervisor's folder. Its errors are raised here; it
                must not raise OSError.
            held: Descriptors for CRIU to keep open while it works.
            say: Called with a line for the user before a wait.

        Raises:
            RestoreBlocked: it failed before the claim.
            UnusableSnapshot: it failed after the claim. No process of the tree runs, as after any
                error.
        """
        record, claimed = self.record, list[bool]()

        def may_go() -> None:
            new_files = claim()
            claimed.append(True)
            _write(record, new_files)

        try:
            _put_files(record, attempt)
            error_text = self._restore(partial(self._restore_once, may_go, held), claimed, say)
            reason = f"CRIU: {error_text}" if error_text else ""
        except OSError as error:
            reason = f"the system: {error}"
        if reason:
            kind = UnusableSnapshot if claimed else RestoreBlocked
            raise kind(f"{record.name} could not be restored, says {reason}")
        if self.gpus is not None:
            try:
                self.gpus.put_back(together=True)
            except GpusLost as error:
                kill(record)
                message = f"{record.name} could not be restored: {error.message}"
                raise UnusableSnapshot(message) from error

    def _restore(
        self, once: Callable[[], str], claimed: Collection[bool], say: Callable[[str], object]
    ) -> str:
        """Run CRIU, and again while an id or port is in use and nothing is claimed.

        Returns:
            As `criu.restore`.
        """
        record, deadline = self.record, time.monotonic() + GONE_WITHIN_S
        waiting = ids_and_ports.PortWait(str(record.name), record.ports, say)

        def is_free(refusal: str) -> bool:
            if criu.is_port_taken(refusal):
                return waiting.may_be_free()
            left_s = deadline - time.monotonic()
            return criu.is_number_taken(refusal) and left_s > 0 and not _why_taken(record, left_s)

        refusal = once()
        while refusal and not claimed and is_free(refusal):
            refusal = once()
        port_holders = ids_and_ports.who_has(record.ports) if criu.is_port_taken(refusal) else ""
        return f"{refusal}; {port_holders}" if port_holders else refusal

    def _restore_once(self, may_go: Callable[[], object], held: Iterable[int]) -> str:
        """Run `criu.restore`; end all remaining processes after any failure."""
        error_text = "it was broken off"
        ids_and_ports.pass_over(self.record.tasks)
        try:
            error_text = criu.restore(self.program, self.images, may_go, held)
        finally:
            if error_text:
                kill(self.record)
        return error_text


@contextlib.contextmanager
def examined(
    tier: LocalTier,
    record: DumpRecord,
    driver: Callable[[], CudaDriver] = CudaDriver,
    key: bytes = b"",
) -> Iterator[RestorableDump]:
    """Check everything knowable before a restore; the block's end closes the GPU driver.

    `key` is that of encrypted images.

    Raises:
        RestoreBlocked: it cannot be restored.
    """
    ability = criu.examine()
    reason = ability.why_not or why_not(record, this_host()) or why_changed(record)
    reason = reason or _why_taken(record, GONE_WITHIN_S / 10)
    if reason or ability.program is None:
        raise RestoreBlocked(f"{record.name} cannot be restored: {reason}", hint=ability.cure)
    with contextlib.ExitStack() as stack:
        images, gpus = tier.root / record.name.folder / IMAGES, None
        if record.gpus is not None:
            try:
                gpus = gpu_state.of_record(record.gpus, stack.enter_context(driver()))
            except UnusableSnapshot as error:
                message = f"{record.name} cannot be restored: {error.message}"
                raise RestoreBlocked(message, hint=error.hint) from error
        try:
            verify(images, record)
            if record.keys:
                images = stack.enter_context(encrypted_images.opened(images, record, key))
            for file in record.written:
                grown(file)
        except UnusableSnapshot as error:
            raise RestoreBlocked(error.message, hint=error.hint) from error
        except OSError as error:
            raise RestoreBlocked(f"{record.name} cannot be restored: {error}") from error
        # Again: reading the images took a while.
        if reason := why_changed(record) or _why_taken(record, GONE_WITHIN_S / 10):
            raise RestoreBlocked(f"{record.name} cannot be restored: {reason}")
        yield RestorableDump(record, ability.program, images, gpus)


def verify(images: Path, record: DumpRecord) -> None:
    """Check the length and digest of every image.

    Raises:
        UnusableSnapshot: an image is missing or changed.
    """
    for image in record.images:
        if reason := why_bad(images / image.name, image):
            raise UnusableSnapshot(f"{record.name}: the image {image.name} {reason}")


def why_bad(path: Path, image: Image) -> str:
    """Return why an image is not the recorded one, or ""."""
    try:
        if reason := why_incomplete(path, image):
            return reason
        return "" if digest_of(path) == image.digest else "is damaged"
    except OSError as error:
        return f"cannot be read: {error}"


def why_incomplete(path: Path, image: Image) -> str:
    """Return why an image cannot be whole, by its length alone, or ""."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    return "" if size == image.num_bytes else f"has {size} bytes, not {image.num_bytes}"


def grown(file: WrittenFile) -> int:
    """Return the bytes a file written by the tree has grown by.

    Raises:
        UnusableSnapshot: it is shorter, gone, or no file; CRIU would wait for a pipe's other end.
    """
    path = Path(file.path)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UnusableSnapshot(f"{path}, which was open for writing, is gone") from None
    if not stat.S_ISREG(status.st_mode):
        raise UnusableSnapshot(f"{path}, which was open for writing, is no file any more")
    size = status.st_size
    if size < file.num_bytes:
        raise UnusableSnapshot(f"{path} has {size} bytes, {file.num_bytes} when it was dumped")
    return size - file.num_bytes


def cut_back(file: WrittenFile, attempt: int) -> None:
    """Cut a file to its old length; a copy beside it has the newer bytes."""
    if grown(file) == 0:
        return
    path = Path(file.path)
    with path.open("r+b") as source:
        with _new_beside(path, f"after-{attempt}") as target:
            source.seek(file.num_bytes)
            while block := source.read(COPY_BYTES):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
        sync(path.parent)  # the copy has its name before the source is cut
        source.truncate(file.num_bytes)
        os.fsync(source.fileno())


@contextlib.contextmanager
def _new_beside(path: Path, ending: str) -> Iterator[BinaryIO]:
    """Open a new file `<path>.<ending>`, or `<path>.<ending>-2` and so on; overwrite none.

    The file is removed if the block fails, as on a full disk: each try would leave another.
    """
    candidate, descriptor = _created_beside(path, ending)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except BaseException:
        with contextlib.suppress(OSError):
            candidate.unlink()
        raise


def _created_beside(path: Path, ending: str) -> tuple[Path, int]:
    for number in itertools.count(1):
        candidate = path.with_name(f"{path.name}.{ending}{f'-{number}' if number > 1 else ''}")
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return candidate, os.open(candidate, flags, 0o600)
    raise AssertionError


def kill(record: DumpRecord) -> None:
    """End all remains of a failed restore below this process.

    They are the processes with its ids that have its variable, or still are CRIU's: a CRIU that is
    killed leaves processes without their environment yet, which start others. Processes restored by
    another supervisor are not touched.
    """
    quiet_rounds = 0
    while quiet_rounds < QUIET_ROUNDS:
        own_pids = {*process_tree.processes(os.getpid())} & {*record.tasks}
        marked_pids = own_pids & {*process_tree.marked(VARIABLE, record.folder)}
        remains = marked_pids | {pid for pid in own_pids if _is_criu(pid)}
        process_tree.send(remains, signal.SIGKILL)
        quiet_rounds = 0 if remains else quiet_rounds + 1
        time.sleep(LOOK_EVERY_S)
    await_gone(record)  # also reaps the root, a child of this process


def _is_criu(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (process_tree.PROC / str(pid) / "exe").readlink().name == criu.NAME
    return False  # as one that has ended


def _why_taken(record: DumpRecord, within_s: float) -> str:
    """Wait for the tree's ids; return a sentence about those still in use, or "".

    CRIU gives every task its old id.
    """
    deadline = time.monotonic() + within_s
    while taken_ids := process_tree.taken(record.tasks):
        if time.monotonic() >= deadline:
            named = ", ".join(map(str, taken_ids[:MOST_NAMED]))
            more = len(taken_ids) - MOST_NAMED
            rest_text = f" and {more} more" if more > 0 else ""
            return f"other processes have its numbers: {named}{rest_text}"
        time.sleep(LOOK_EVERY_S)
    return ""


def _put_files(record: DumpRecord, attempt: int) -> None:
    """Restore files to their dumped state: those written by the tree, and the supervisor's.

    Raises:
        RestoreBlocked: a file written by the tree is shorter or gone, or cannot be cut back.
    """
    for file in record.written:
        try:
            cut_back(file, attempt)
        except UnusableSnapshot as error:
            raise RestoreBlocked(f"{record.name} cannot be restored: {error.message}") from error
        except OSError as error:
            message = f"{file.path} has grown and cannot be cut back: {error.strerror or error}"
            raise RestoreBlocked(f"{record.name} cannot be restored: {message}") from error
    Path(record.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(record, record.told)


def _write(record: DumpRecord, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        # with the mode of the old file, which CRIU compares if a process has it open
        write_private(Path(record.folder) / name, text.encode())
