"""Brings a dumped tree of processes back, once. The mirror of `dump`.

    examined      nothing is touched: what is refused here is as it was, and may be tried again
      1. refusals   host, kernel, processor, CRIU, GPUs, libraries that changed, numbers that are
                    taken
      2. images     every length and digest; what is encrypted is opened
      3. files      that the tree wrote are there, and long enough
    bring_back
      4. files      are cut back to their length then, after what came later was copied aside
                    (`<file>.after-<attempt>`, on stable storage)
      5. folder     the supervisor's, with what the ranks had told it
      6. CRIU       the tree is there again, its root a child of this process, and stands
      7. claim      from here on the dump is used up
      8. CRIU       the tree runs
      9. GPUs       what was on them is put back; until then whoever uses them waits

A restore that fails leaves no process of the tree. Until it is claimed nothing of the tree has run,
so the dump may be tried again; where others took a number or a port of the tree's meanwhile, that
is waited for, and CRIU is asked again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.dump import DUMPS, IMAGES, MAX_BYTES, DumpName, DumpRecord
from trainckpt.process_dump import criu, gpu_tree, numbers, ports, sealed_images, tree
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.dump import GONE_WITHIN_S, LOOK_EVERY_S, await_gone, digest_of
from trainckpt.process_dump.gpus import GpusLost
from trainckpt.process_dump.host import this_host

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from trainckpt.format.dump import Host, WrittenFile
    from trainckpt.process_dump.gpu_tree import GpuTree
    from trainckpt.tiers.base import Readable
    from trainckpt.tiers.local import LocalTier

VARIABLE = "TRAINCKPT_SUPERVISOR"  # marks the processes of one launch
COPY_BYTES = 1 << 20
MOST_NAMED = 5


def load(tier: Readable, run: str, name: DumpName) -> DumpRecord:
    """The record of one dump, checked to be the one its place promises.

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
    """Every dump that was committed, newest first."""
    found = map(DumpName.parse, tier.list(DUMPS))
    return sorted((n for n in found if n is not None and tier.size(n.record) is not None),
                  reverse=True)  # fmt: skip


def why_not(record: DumpRecord, host: Host) -> str:
    """Why it cannot be brought back on a host, or "". Pure."""
    there = record.host
    if there.name != host.name:
        return f"it was taken on {there.name}, this is {host.name}"
    if there.kernel != host.kernel:
        return f"it was taken under the kernel {there.kernel}, this is {host.kernel}"
    if missing := sorted({*there.flags} - {*host.flags}):
        return f"this processor lacks {', '.join(missing[:MOST_NAMED])}"
    return ""


def why_changed(record: DumpRecord) -> str:
    """Which library, or other file that was mapped, is not as it was; "" if all are.

    CRIU compares sizes and, where there are any, build ids; a file that was written anew in the
    same size would give the processes other code.
    """
    for file in record.mapped:
        try:
            found = Path(file.path).stat()
        except OSError:
            return f"{file.path}, which was mapped, is gone"
        if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.changed_ns):
            return f"{file.path}, which was mapped, has changed since"
    return ""


class NotNow(UnusableSnapshot):
    """Nothing of the tree has run: it can be restored once what is against it is no more."""


@dataclass(frozen=True)
class Whole:
    """A dump that nothing is known against.

    Attributes:
        record: Which.
        program: CRIU.
        images: Where they lie as CRIU reads them, each as it was written.
        gpus: What is to be put back on GPUs, or None.
    """

    record: DumpRecord
    program: Path
    images: Path
    gpus: GpuTree | None

    def bring_back(
        self,
        attempt: int,
        claim: Callable[[], Mapping[str, str]],
        held: Iterable[int] = (),
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Restore it as another attempt of its run.

        Args:
            attempt: Which it is taken to become: the name of what is copied aside.
            claim: Is called once all of the tree is there, before any of it goes on. Returns file
                name -> text: what else stands in the supervisor's folder then. What it raises comes
                out; it is no OSError.
            held: Descriptors that CRIU holds too, as long as it works.
            say: Hears what is waited for.

        Raises:
            NotNow: it cannot be; nothing was claimed.
            UnusableSnapshot: it failed after that. Nothing of it runs, as after any error.
        """
        record, claimed = self.record, list[bool]()

        def may_go() -> None:
            more = claim()
            claimed.append(True)
            _write(record, more)

        try:
            _put_files(record, attempt)
            said = self._restore(partial(self._restore_once, may_go, held), claimed, say)
            why = f"CRIU: {said}" if said else ""
        except OSError as error:
            why = f"the system: {error}"
        if why:
            kind = UnusableSnapshot if claimed else NotNow
            raise kind(f"{record.name} could not be restored, says {why}")
        if self.gpus is not None:
            _put_back(self.gpus, record)

    def _restore(
        self, once: Callable[[], str], claimed: Collection[bool], say: Callable[[str], object]
    ) -> str:
        """As `criu.restore`; waits for what others have as long as nothing is claimed."""
        record, until = self.record, time.monotonic() + GONE_WITHIN_S
        waiting = ports.Waiting(str(record.name), record.ports, say)

        def is_free(said: str) -> bool:
            if criu.is_port_taken(said):
                return waiting.may_be_free()
            left_s = until - time.monotonic()
            return criu.is_number_taken(said) and left_s > 0 and not _why_taken(record, left_s)

        said = once()
        while said and not claimed and is_free(said):
            said = once()
        who = ports.who_has(record.ports) if criu.is_port_taken(said) else ""
        return f"{said}; {who}" if who else said

    def _restore_once(self, may_go: Callable[[], object], held: Iterable[int]) -> str:
        """As `criu.restore`; of what cannot be nothing is left, whatever else failed."""
        said = "it was broken off"
        numbers.pass_over(self.record.tasks)
        try:
            said = criu.restore(self.program, self.images, may_go, held)
        finally:
            if said:
                kill(self.record)
        return said


@contextlib.contextmanager
def examined(
    tier: LocalTier,
    record: DumpRecord,
    driver: Callable[[], CudaDriver] = CudaDriver,
    key: bytes = b"",
) -> Iterator[Whole]:
    """Look at all that can be known before it is restored; the GPUs' driver waits for the block.

    Args:
        tier, record: Where, and what.
        driver: Made only where there is something to put back on GPUs.
        key: Of images that are encrypted.

    Raises:
        NotNow: it cannot be restored.
    """
    ability = criu.examine()
    why = ability.why_not or why_not(record, this_host()) or why_changed(record)
    why = why or _why_taken(record, GONE_WITHIN_S / 10)
    if why or ability.program is None:
        raise NotNow(f"{record.name} cannot be restored: {why}", hint=ability.cure)
    with contextlib.ExitStack() as stack:
        gpus = stack.enter_context(_gpus(record, driver))
        images = tier.root / record.name.folder / IMAGES
        try:
            verify(images, record)
            if record.keys:
                images = stack.enter_context(sealed_images.opened(images, record, key))
            for file in record.written:
                grown(file)
        except UnusableSnapshot as error:
            raise NotNow(error.message, hint=error.hint) from error
        except OSError as error:
            raise NotNow(f"{record.name} cannot be restored: {error}") from error
        # That took its time.
        if why := why_changed(record) or _why_taken(record, GONE_WITHIN_S / 10):
            raise NotNow(f"{record.name} cannot be restored: {why}")
        yield Whole(record, ability.program, images, gpus)


@contextlib.contextmanager
def _gpus(record: DumpRecord, driver: Callable[[], CudaDriver]) -> Iterator[GpuTree | None]:
    """What is to be put back on GPUs, once it is known that it can be."""
    if record.gpus is None:
        yield None
        return
    with driver() as cuda:
        try:
            found = gpu_tree.of_record(record.gpus, cuda)
        except UnusableSnapshot as error:
            why = f"{record.name} cannot be restored: {error.message}"
            raise NotNow(why, hint=error.hint) from error
        yield found


def _put_back(gpus: GpuTree, record: DumpRecord) -> None:
    """All of it, or none of the processes goes on."""
    try:
        gpus.put_back(together=True)
    except GpusLost as error:
        kill(record)
        raise UnusableSnapshot(f"{record.name} could not be restored: {error.message}") from error


def verify(images: Path, record: DumpRecord) -> None:
    """Every image is as it was written."""
    for image in record.images:
        path = images / image.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise UnusableSnapshot(f"{record.name}: the image {image.name} is missing") from None
        if size != image.num_bytes:
            why = f"has {size} bytes, not {image.num_bytes}"
            raise UnusableSnapshot(f"{record.name}: the image {image.name} {why}")
        if digest_of(path) != image.digest:
            raise UnusableSnapshot(f"{record.name}: the image {image.name} is damaged")


def grown(file: WrittenFile) -> int:
    """By how many bytes a file that the tree wrote has grown.

    Raises:
        UnusableSnapshot: it is shorter, or gone.
    """
    path = Path(file.path)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UnusableSnapshot(f"{path}, which was open for writing, is gone") from None
    if size < file.num_bytes:
        raise UnusableSnapshot(f"{path} has {size} bytes, {file.num_bytes} when it was dumped")
    return size - file.num_bytes


def cut_back(file: WrittenFile, attempt: int) -> None:
    """Make a file as long as it was; what came later is kept beside it."""
    if grown(file) == 0:
        return
    path = Path(file.path)
    with path.open("r+b") as source, _new_beside(path, f"after-{attempt}") as target:
        source.seek(file.num_bytes)
        while block := source.read(COPY_BYTES):
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
        _sync_folder(path.parent)  # the copy has its name before the source is cut
        source.truncate(file.num_bytes)
        os.fsync(source.fileno())


def _new_beside(path: Path, ending: str) -> BinaryIO:
    """A new file `<path>.<ending>`, or `<path>.<ending>-2` and on: none is written over."""
    for number in itertools.count(1):
        beside = path.with_name(f"{path.name}.{ending}{f'-{number}' if number > 1 else ''}")
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return os.fdopen(os.open(beside, flags, 0o600), "wb")
    raise AssertionError


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kill(record: DumpRecord) -> None:
    """End what a failed restore may have left below us: tasks with its numbers and its variable.

    Not what another process may have brought back.
    """
    ours = {*tree.processes(os.getpid())}
    for pid in {*tree.marked(VARIABLE, record.folder)} & {*record.tasks} & ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await_gone(record)  # also takes note of the root, which was to be a child of this process


def _why_taken(record: DumpRecord, within_s: float) -> str:
    """Wait for the numbers; CRIU gives every task its old one."""
    until = time.monotonic() + within_s
    while taken := tree.taken(record.tasks):
        if time.monotonic() >= until:
            return f"other processes have its numbers: {_some(taken)}"
        time.sleep(LOOK_EVERY_S)
    return ""


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return f"{', '.join(map(str, numbers[:MOST_NAMED]))}{more}"


def _put_files(record: DumpRecord, attempt: int) -> None:
    """As they were: those that the tree wrote, and the supervisor's.

    Raises:
        NotNow: one that the tree wrote has become shorter, or is gone.
    """
    try:
        for file in record.written:
            cut_back(file, attempt)
    except UnusableSnapshot as error:
        raise NotNow(f"{record.name} cannot be restored: {error.message}") from error
    Path(record.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(record, record.told)


def _write(record: DumpRecord, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (Path(record.folder) / name).write_text(text, encoding="utf-8")
