"""Protection: after a save, other hosts hold what this one holds, so that losing it loses nothing.

    saving thread, every rank, once all have reported on the save
    1  rank 0 gives all the manifest; each reserves memory for what it is to keep
       BARRIER  all have it; a rank that has none says so, and nothing is kept of this save
    2  copies pass to partners, or parities are computed in sets (`snapshot.protect`), in groups of
       their own: training's groups and its thread take no part
    3  copies are verified by the digests of the manifest; what is kept gets its names
       BARRIER  all have come so far: the save has reached "partner"
    4  what was kept of older snapshots may be overwritten

Of an encrypted run it is the encrypted file that passes, which lies in memory beside the one it was
made of: nobody needs a key to keep, compare or compute it, and what others hold says nothing.

A rank that dies or hangs ends 2 on whoever waits for it, within `STEP_S`; all say so in 3, and the
next save begins with new groups. A last save ends it too (`give_way`). Nothing here fails a save.
After a resume the same is done with the snapshot that the attempt began from (`kept_again`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import parity_file
from trainckpt.format.checking import is_file
from trainckpt.format.digest import digest
from trainckpt.format.names import sealed_file_name
from trainckpt.format.parity_file import HEAD_BYTES, ParityHead
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.saving import holding
from trainckpt.lifecycle.saving.holding import copy_slot, parity_slot, sets_of
from trainckpt.lifecycle.saving.holding import sizes as sizes_of
from trainckpt.ranks.exchange import Exchange
from trainckpt.snapshot.protect import copy_files, make_parities
from trainckpt.tiers import kept
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.saving.kept_again import StoredSnapshot
    from trainckpt.ranks.channel import Channel
    from trainckpt.snapshot.redundancy import Plan
    from trainckpt.tiers.arena import Arena

STEP_S = 30.0  # for one round of a few megabytes
BARRIER_S = 60.0  # beyond what the longest file takes at the slowest
SLOWEST_BYTES_PER_S = 10e6


class Unprotected(Exception):
    """Nothing is kept of this save elsewhere; says why."""


class Protection:
    """What one rank of an attempt does for the others' files, and they for its own.

    Attributes:
        plan: Who keeps what.
        newest: Folder of the newest snapshot that all ranks have protected, or began from.
    """

    def __init__(self, plan: Plan, channel: Channel, run: str, local: Sequence[int]) -> None:
        self.plan = plan
        self.newest: str | None = None
        self._channel = channel.connection()
        self._rank = channel.world.rank
        self._leads = self._rank == local[0]  # of its host
        self._place = MemoryPlace.of(run)
        self._slots: dict[str, kept.Slot] = {}
        self._sealed: Arena | None = (
            None  # holds this rank's file, encrypted, of the save in flight
        )
        self._groups: dict[str, Exchange] = {}
        self._in_way, self._newer = threading.Event(), threading.Event()
        self._lost = ""
        self._forgotten = 1  # the first save of which keys are left

    def give_way(self) -> None:
        """Something more urgent needs the network, on all ranks alike."""
        self._in_way.set()

    def take_way(self) -> None:
        """What is kept now is the most urgent."""
        self._in_way.clear()

    def supersede(self, *, over: bool) -> None:
        """What `protect_again` does is not worth it any more: all ranks come to a newer snapshot.

        `over`: it has ended.
        """
        if over:
            self._newer.clear()
        else:
            self._newer.set()

    @property
    def num_ranks(self) -> int:
        """Of the attempt."""
        return self._channel.world.size

    @property
    def gives_way(self) -> bool:
        """Whether a last save has come."""
        return self._in_way.is_set()

    @property
    def is_cut_off(self) -> bool:
        """Whether a rank is gone, or the store: nothing will be kept any more."""
        return bool(self._lost)

    def room(self, num_bytes: int) -> Arena | None:
        """Memory for this rank's file of the next save, encrypted; None: there is none."""
        self._sealed = None
        if self._place is not None:
            name = kept.sealed_slot(self._rank)
            slot = self._slots.setdefault(name, kept.Slot(self._place, name, anew=True))
            with contextlib.suppress(OSError):
                arena = slot.free(self.newest)
                arena.reserve(num_bytes)
                self._sealed = arena
        return self._sealed

    def sealed_bytes(self) -> tuple[int, int]:
        """What `room` has already for the next save, and in all."""
        slot = self._slots.get(kept.sealed_slot(self._rank))
        return slot.capacity_bytes(self.newest) if slot is not None else (0, 0)

    @property
    def has_sealed(self) -> bool:
        """Whether this rank's file of the save in flight lies in memory, encrypted."""
        return self._sealed is not None

    def protect(self, name: SnapshotName, whole: Manifest | None, mine: memoryview | None) -> None:
        """Every rank, for each save on which all have reported.

        Args:
            name: Of the snapshot.
            whole: Its manifest, on rank 0.
            mine: This rank's file, its bytes complete; None if it lies in no memory. Where the run
                is encrypted, what lies in `room` is taken instead.

        Raises:
            Unprotected: on all ranks alike.
        """
        key = f"keep/{name.sequence}"
        with self._all_or_nobody():
            # Two keys in turn: nobody still reads the one before.
            manifest = self._share(key, f"keep/manifest/{name.sequence % 2}", whole)
            if manifest.encryption is not None and mine is not None:
                mine = self._sealed.memory if self._sealed is not None else None
            self._keep(key, manifest, mine, self._sealed)
            self._forget(name.sequence)
        self._release(name.folder)
        self._drop_fetched()

    def protect_again(self, held: StoredSnapshot) -> int:
        """Every rank, once, before the first `protect` or beside what comes before it: the snapshot
        that the attempt began from.

        Returns:
            How many ranks had lost what they are to hold of it; with none, nothing was done.

        Raises:
            Unprotected: on all ranks alike.
        """
        key, at, why, whole = "keep/again", "keep/manifest/again", "", None
        self.newest = held.name.folder
        with self._all_or_nobody(once=True):
            if self._rank == 0:
                try:
                    whole = held.manifest()
                except (TrainckptError, OSError) as error:
                    why = str(getattr(error, "message", error))
            manifest = self._share(key, at, whole, why)
            mine = self._lacks(held, manifest)
            found = self._channel.fold(f"{key}/lacking", mine, _sum_of, RANKS_TIMEOUT_S)
            if found["why"]:
                raise Unprotected(found["why"])
            lacking = int(found["lacks"])
            if lacking:
                self._keep_stored(key, manifest, held)
                self._release(manifest.name.folder)
            if self._rank == 0:
                self._channel.forget([at])  # all have read it
        return lacking

    def _lacks(self, held: StoredSnapshot, manifest: Manifest) -> dict[str, Any]:
        """Whether this rank's host lacks what it is to hold; or why that is not known."""
        lacks, why = False, ""
        try:
            self._may_go_on()
            lacks = held.lacks(manifest, holding.names(self.plan, self._rank, manifest))
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            why = f"rank {self._rank}: {getattr(error, 'message', repr(error))}"
        return {"lacks": int(lacks), "why": why}

    @contextlib.contextmanager
    def _all_or_nobody(self, *, once: bool = False) -> Iterator[None]:
        """What goes wrong on any rank is `Unprotected` on all.

        `once`: a rank that is late need not be gone, and this is not tried again.
        """
        if self._lost:
            raise Unprotected(self._lost)
        try:
            yield
        except NoAgreement as error:
            if once:
                self._leave_groups()
            else:
                self._lost = error.message
            raise Unprotected(error.message) from error
        except Unprotected:
            self._leave_groups()
            if self.newest is not None:
                self._release_manifests(self.newest)  # but what others made stands
            raise

    def _release_manifests(self, newest: str) -> None:
        """All but one; none where something newer is under way, whose own may be there by now."""
        if self._leads and self._place is not None and not self._newer.is_set():
            kept.release_manifests(self._place, [newest])

    def _keep_stored(self, key: str, manifest: Manifest, held: StoredSnapshot) -> None:
        """Steps 1 to 3 with this rank's file as it was stored, which may be gone or bad."""
        mine, why = None, ""
        with contextlib.ExitStack() as stack:
            try:
                mine = stack.enter_context(held.file(manifest, self._may_go_on))
            except Exception as error:  # noqa: BLE001 - the others wait for an answer
                why = f"rank {self._rank}: {getattr(error, 'message', repr(error))}"
            self._keep(key, manifest, mine, None, why)

    def _keep(
        self,
        key: str,
        manifest: Manifest,
        mine: memoryview | None,
        sealed: Arena | None,
        why: str = "",
    ) -> None:
        """Steps 1 to 3, on all ranks or none."""
        longest = max(file.num_bytes for file in manifest.files)
        limit_s = BARRIER_S + longest / SLOWEST_BYTES_PER_S
        memories: dict[str, Arena] = {}
        why = why or self._reserve(manifest, mine, memories)
        self._agree(f"{key}/ready", why, limit_s)
        try:
            assert mine is not None
            self._exchange(key, manifest, mine, memories)
            self._name(manifest, memories, sealed)
        except (TrainckptError, OSError) as error:
            why = f"rank {self._rank}: {getattr(error, 'message', error)}"
            self._leave_groups()  # whoever waits for this rank hears of it at once
        self._agree(f"{key}/done", why, limit_s)

    def close(self, *, keep: bool) -> None:
        """The attempt is over; `keep` what is held for others."""
        self._leave_groups()
        for slot in self._slots.values():
            slot.close(keep=keep)
        if not keep:
            self._drop_fetched()
        if not keep and self._leads and self._place is not None:
            kept.release_manifests(self._place, ())

    def _share(self, key: str, at: str, whole: Manifest | None, why: str = "") -> Manifest:
        """Rank 0's manifest, on all ranks; or why it has none."""
        if self._rank == 0 and whole is not None:
            self._channel.put(at, manifests.dump(whole).decode())
        self._agree(f"{key}/manifest", why, RANKS_TIMEOUT_S)
        return manifests.load(self._channel.peek(at).encode(), "the manifest of what is kept")

    def _agree(self, key: str, why: str, limit_s: float) -> None:
        """Raises `Unprotected` on all ranks if any says why."""
        verdict = self._channel.fold(key, {"why": why}, _all_of, limit_s)
        if verdict["why"]:
            raise Unprotected(verdict["why"])

    def _forget(self, sequence: int) -> None:
        """Keys that all ranks have read, since all have come to the end of this save; those of
        saves too that failed.
        """
        before = range(self._forgotten, sequence)
        stages = [f"keep/{n}/{stage}" for n in before for stage in ("manifest", "ready", "done")]
        stages += [f"keep/{sequence}/manifest", f"keep/{sequence}/ready"]
        keys = [f"{stage}/{self._rank}" for stage in stages]
        if self._rank == 0:
            keys += [key for stage in stages for key in self._channel.fold_keys(stage)]
        self._channel.forget(keys)
        self._forgotten = sequence

    def _reserve(self, manifest: Manifest, mine: memoryview | None, into: dict[str, Arena]) -> str:
        """Memory for all that this rank is to keep of this save; or why there is none."""
        if mine is None or self._place is None:
            return f"rank {self._rank} has not the shared memory for it"
        try:
            for name, num_bytes in holding.slots(self.plan, self._rank, manifest).items():
                slot = self._slots.setdefault(name, kept.Slot(self._place, name))
                into[name] = slot.free(self.newest)
                into[name].reserve(num_bytes)
        except OSError as error:
            return f"rank {self._rank} has no memory for what it is to keep ({error})"
        return ""

    def _exchange(
        self, key: str, manifest: Manifest, mine: memoryview, into: dict[str, Arena]
    ) -> None:
        """Step 2; what lies in memory afterwards is whole and verified."""
        self._join(key)
        owners = self.plan.kept_by(self._rank)
        copies = [(self._groups[copy_slot(o)], into[copy_slot(o)].memory) for o in owners]
        copy_files(mine, self._groups.get(copy_slot(self._rank)), copies, self._may_go_on)
        for owner in owners:
            file = manifest.files[owner]
            if not is_file(into[copy_slot(owner)].memory, file):
                raise UnusableSnapshot(f"the copy of {file.name} is not what was sent")
        for number, coded in sets_of(self.plan, self._rank):
            memory, place = into[parity_slot(number)].memory, coded.members.index(self._rank)
            sizes, own = sizes_of(coded, manifest), mine if place < coded.num_own else mine[:0]
            make_parities(coded, place, sizes, own, memory[HEAD_BYTES:],
                          self._groups[parity_slot(number)], self._may_go_on)  # fmt: skip
            head = ParityHead(
                str(manifest.name), number, coded.members, coded.num_own, coded.num_parity, place,
                coded.chunk_bytes(max(sizes)), digest(memory[HEAD_BYTES:]),
            )  # fmt: skip
            memory[:HEAD_BYTES] = parity_file.dump(head)

    def _join(self, key: str) -> None:
        """Find the members of this rank's groups, in one order on all ranks."""
        if self._groups:
            return
        partners = dict(enumerate(self.plan.partners))
        wanted: dict[str, tuple[int, ...]] = {
            copy_slot(o): (o, p) for o, p in partners.items() if self._rank in (o, p)
        }
        wanted.update(
            {parity_slot(number): coded.members for number, coded in sets_of(self.plan, self._rank)}
        )
        for called, members in wanted.items():
            self._may_go_on()
            self._groups[called] = Exchange(
                self._channel, f"{key}/groups/{called}", members, STEP_S
            )

    def _name(self, manifest: Manifest, memories: dict[str, Arena], sealed: Arena | None) -> None:
        """Step 3: let it be found."""
        folder, is_sealed = manifest.name.folder, manifest.encryption is not None
        if is_sealed and sealed is not None:
            sealed.publish(folder, sealed_file_name(self._rank))
        called = holding.file_name(manifest)
        for owner in self.plan.kept_by(self._rank):
            memories[copy_slot(owner)].publish(folder, called(owner))
        for number, coded in sets_of(self.plan, self._rank):
            place = coded.members.index(self._rank)
            memories[parity_slot(number)].publish(folder, parity_file.file_name(number, place))
        if self._leads and self._place is not None:
            kept.write_manifest(self._place, folder, manifests.dump(manifest))

    def _release(self, newest: str) -> None:
        self.newest = newest
        for slot in self._slots.values():
            slot.release(newest)
        self._release_manifests(newest)

    def _drop_fetched(self) -> None:
        """What was fetched for `protect_again` has served, in this attempt or one before."""
        if self._place is not None:
            kept.remove_slot(self._place, kept.fetched_slot(self._rank))

    def _may_go_on(self) -> None:
        if self._in_way.is_set():
            raise NoAgreement("a last save needs the network")
        if self._newer.is_set():
            raise NoAgreement("a newer snapshot is to be kept")

    def _leave_groups(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}


def _sum_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"lacks": sum(answer["lacks"] for answer in answers), **_all_of(answers)}


def _all_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"why": "; ".join(answer["why"] for answer in answers if answer["why"])[:1000]}
