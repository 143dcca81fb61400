"""Kept again: after a resume, other hosts hold what they should of the snapshot it began from.

A host that was replaced has brought nothing, and what was rebuilt lies on one host alone. The next
save would mend that; until then another loss could take what memory holds of the snapshot. So a
thread of every rank, beside training, at once:

    1  looks whether its host's memory lacks, or has bad, anything that redundancy asks for
       BARRIER  nobody does, as a rule: that is all
    2  has its own file at hand: in this host's memory, else read from the nearest tier
    3  passes copies or parities, as after a save (`Protection`)

The files are passed as they are stored: what is encrypted stays so. Verified before and after.
The next save ends all this: it is newer; where there is one arena alone, before it is staged there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format.checking import is_file
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.saving import holding
from trainckpt.lifecycle.saving.protection import Unprotected
from trainckpt.ranks import talking
from trainckpt.snapshot import catalog
from trainckpt.snapshot.memory_copies import read_parity
from trainckpt.tiers import kept
from trainckpt.tiers.ladder import Ladder
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.format.files import FileEntry
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.saving.protection import Protection
    from trainckpt.tiers.base import Tier

PART_BYTES = 8 << 20


class StoredSnapshot:
    """One rank's view of a committed snapshot, of as many ranks as there are.

    Attributes:
        name: Its name.
    """

    def __init__(
        self, tiers: Sequence[Tier], run: str, name: SnapshotName, rank: int,
        has_room: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """`has_room`: whether so many bytes of memory may be taken for this rank's file."""
        self.name = name
        self._ladder, self._run, self._rank = Ladder(tiers), run, rank
        self._place = MemoryPlace.of(tiers[0].url)
        self._has_room = has_room

    def manifest(self) -> Manifest:
        """As it is stored: the same bytes on every host."""
        return catalog.load_manifest(self._ladder, self._run, self.name)

    def lacks(self, manifest: Manifest, names: set[str]) -> bool:
        """Whether this host's memory has not all of these files of it, and good."""
        if self._place is None:
            return True
        called = holding.file_name(manifest)
        files = {called(rank): file for rank, file in enumerate(manifest.files)}
        there = set(kept.files(self._place, self.name.folder))
        return not (names <= there and all(self._is_good(n, files) for n in sorted(names)))

    def _is_good(self, name: str, files: Mapping[str, FileEntry]) -> bool:
        held = None if self._place is None else self._place.held(self.name.folder, name)
        if held is None or name == kept.MANIFEST:
            return held is not None
        with contextlib.closing(held):
            if name in files:
                return is_file(held.data[: files[name].num_bytes], files[name])
            try:
                read_parity(held.data, name)
            except UnusableSnapshot:
                return False
        return True

    @contextlib.contextmanager
    def file(self, manifest: Manifest, may_go_on: Callable[[], None]) -> Iterator[memoryview]:
        """This rank's file, in this host's memory under its name.

        Args:
            manifest: Of the snapshot.
            may_go_on: Raises where it is not wanted any more; asked while it is fetched.

        Raises:
            UnusableSnapshot: it is not what the manifest says.
            TrainckptError, OSError: it cannot be had, or there is no memory for it.
        """
        file, called = manifest.files[self._rank], holding.file_name(manifest)(self._rank)
        if self._place is None:
            raise OSError("there is no shared memory")
        held = self._place.held(self.name.folder, called, file.num_bytes)
        if held is None or not is_file(held.data, file):
            self._fetch(manifest, called, may_go_on)
            held = self._place.held(self.name.folder, called, file.num_bytes)
        if held is None:
            raise OSError(f"{called} is not in memory any more")
        try:
            yield held.data
            if not is_file(held.data, file):
                raise UnusableSnapshot(f"{called} was written over by a newer save")
        finally:
            held.close()

    def _fetch(self, manifest: Manifest, called: str, may_go_on: Callable[[], None]) -> None:
        """Into memory that no save uses, until the next one is kept by others."""
        assert self._place is not None
        file = manifest.files[self._rank]
        if not self._has_room(file.num_bytes):
            raise OSError(f"no memory is left for {called}")
        name, key = kept.fetched_slot(self._rank), f"{self.name.folder}/{file.name}"
        kept.remove_slot(self._place, name)
        with contextlib.closing(
            self._place.open_arena(kept.arena_path(self._place, name, 0))
        ) as arena:
            arena.reserve(file.num_bytes)
            try:
                self._read(key, arena.memory, file, may_go_on)
            except BaseException:
                arena.empty()
                raise
            arena.publish(self.name.folder, called)

    def _read(
        self, key: str, into: memoryview, file: FileEntry, may_go_on: Callable[[], None]
    ) -> None:
        self._ladder.sizes = {key: len(into)}
        steps = range(0, len(into), PART_BYTES)
        parts = [(at, into[at : at + PART_BYTES]) for at in steps]
        self._ladder.read_parts(key, parts, lambda _: may_go_on())
        if not is_file(into, file):
            raise UnusableSnapshot(f"{key} does not match its digest")


class KeptAgain:
    """The thread of one rank. Sequence of calls: `start`, `end`."""

    def __init__(self, protection: Protection, snapshot: StoredSnapshot, *, says: bool) -> None:
        """`says`: what happens, for all ranks."""
        self._protection, self._snapshot, self._says = protection, snapshot, says
        self._thread = talking.thread(self._run, "trainckpt-again")

    def start(self) -> None:
        """All ranks, while nothing newer is kept."""
        self._thread.start()

    def join(self, limit_s: float | None = None) -> bool:
        """Whether it has ended, within so many seconds."""
        if self._thread.is_alive():
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def end(self, limit_s: float | None = None) -> bool:
        """All ranks come to something newer. Whether it has ended, within so many seconds."""
        self._protection.supersede(over=False)
        if not self.join(limit_s):
            return False
        self._protection.supersede(over=True)
        return True

    def _run(self) -> None:
        name = self._snapshot.name
        try:
            lacking = self._protection.protect_again(self._snapshot)
        except Unprotected as why:
            if self._says and not self._protection.gives_way:
                logger.info("other hosts do not hold %s again, only what is saved next: %s",
                            name, why)  # fmt: skip
        except (TrainckptError, OSError) as error:
            logger.warning("other hosts do not hold %s again: %s", name, error)
        except Exception as error:  # noqa: BLE001 - training goes on
            logger.warning("other hosts do not hold %s again: %r", name, error)
        else:
            if lacking and self._says:
                logger.info("other hosts hold %s again, as redundancy asks for: %d of its %d ranks "
                            "had lost what they are to hold", name, lacking,
                            self._protection.num_ranks)  # fmt: skip
