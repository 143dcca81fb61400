"""Replication after a save: other hosts hold copies or parities of this host's files.

    saving thread, every rank, once all have reported on the save
    1  rank 0 shares the manifest; each rank reserves memory for the replicas it is to hold
       BARRIER  all have memory; if a rank has none, this save is not replicated
    2  copies pass to partners, or parities are computed in sets (`snapshot.peer_transfer`), in
       groups of their own: training's groups and its thread take no part
    3  copies are verified by the digests of the manifest; replicas get their names
       BARRIER  all have come so far: the save has reached "partner"
    4  replicas of older snapshots may be overwritten

In an encrypted run the encrypted file passes; it lies in memory beside the plain one. No rank needs
a key to store, compare or compute it, and the replicas reveal nothing.

A rank that dies or hangs ends step 2 on the ranks waiting for it, within `STEP_S`. All report that
in step 3, and the next save begins with new groups. A final save ends it too (`pause`). A
failure here never fails a save. After a resume the same is done with the snapshot from which the
attempt began (`rereplicate`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import NoAgreement, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import parity_file
from trainckpt.format.digest import digest
from trainckpt.format.digest_check import is_file
from trainckpt.format.names import sealed_file_name, shard_file_name
from trainckpt.format.parity_file import HEAD_BYTES, ParityHead
from trainckpt.ranks.exchange import Exchange
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.snapshot import parity
from trainckpt.snapshot.peer_transfer import copy_files, make_parities
from trainckpt.snapshot.redundancy import NOTHING, PARITY, RedundancySpec, make_plan
from trainckpt.storage import replica_slots
from trainckpt.storage.replica_slots import MANIFEST
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore
    from trainckpt.replicate.rereplicate import StoredSnapshot
    from trainckpt.snapshot.redundancy import CodedSet, RedundancyPlan
    from trainckpt.storage.arena import Arena


# ---- replica layout: the files that one rank's host holds in memory
#
# Slots are the arena pairs in which replicas are made (`storage/replica_slots.py`). Names are those
# of a snapshot's files.


def sets_of(plan: RedundancyPlan, rank: int) -> list[tuple[int, CodedSet]]:
    """Return the parity sets of a rank, with their numbers."""
    return [(number, coded) for number, coded in enumerate(plan.sets) if rank in coded.members]


def names(plan: RedundancyPlan, rank: int, manifest: Manifest) -> set[str]:
    """Return the files a host holds because of a rank: its own, its replicas, the manifest."""
    name_of = file_name(manifest)
    files = {name_of(number) for number in (rank, *plan.kept_by(rank))}
    for number, coded in sets_of(plan, rank):
        files.add(parity_file.file_name(number, coded.members.index(rank)))
    return files | {MANIFEST}


def file_name(manifest: Manifest) -> Callable[[int], str]:
    """Return the function from a rank to the name of its stored file in memory."""
    return sealed_file_name if manifest.encryption is not None else shard_file_name


def file_sizes(coded: CodedSet, manifest: Manifest) -> list[int]:
    """Return the bytes of each member's file; 0 for members that only hold parities."""
    return [
        manifest.files[rank].num_bytes if place < coded.num_own else 0
        for place, rank in enumerate(coded.members)
    ]


def copy_slot(owner: int) -> str:
    """Return the slot name of the copy of a rank's file."""
    return f"copy{owner:05d}"


def parity_slot(number: int) -> str:
    """Return the slot name of a set's parities."""
    return f"parity{number:05d}"


# ---- the replicator


STEP_S = 30.0  # for one round of a few megabytes
BARRIER_S = 60.0  # beyond what the longest file takes at the slowest
SLOWEST_BYTES_PER_S = 10e6


class ReplicationFailed(Exception):
    """This save is not replicated; the message says why."""


class Replicator:
    """One rank's part in the replication between hosts.

    Attributes:
        plan: Owners and holders of each replica.
        newest: Folder of the newest snapshot replicated by all ranks, or resumed from.
    """

    def __init__(
        self, plan: RedundancyPlan, channel: RankStore, run: str, hosts: Sequence[str]
    ) -> None:
        self.plan = plan
        self.newest: str | None = None
        self._channel = channel.connection()
        self._rank = channel.world.rank
        self._is_first_on_host = self._rank == hosts.index(channel.world.host)
        self._memory_dir = SharedMemoryDir.of(run)
        self._slots: dict[str, replica_slots.DoubleBuffer] = {}
        # holds this rank's file, encrypted, of the save in flight
        self._encrypted: Arena | None = None
        self._groups: dict[str, Exchange] = {}
        self._paused, self._superseded = threading.Event(), threading.Event()
        self._failure = ""
        self._first_undeleted = 1  # the first save of which keys are left

    def pause(self) -> None:
        """Pause for something more urgent that needs the network, on all ranks alike."""
        self._paused.set()

    def unpause(self) -> None:
        """Undo `pause`: replication is the most urgent work now."""
        self._paused.clear()

    def supersede(self, *, over: bool) -> None:
        """End `replicate_stored`: all ranks have a newer snapshot. `over`: it has ended."""
        (self._superseded.clear if over else self._superseded.set)()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the attempt."""
        return self._channel.world.size

    @property
    def is_paused(self) -> bool:
        """True if a final save has come."""
        return self._paused.is_set()

    @property
    def is_cut_off(self) -> bool:
        """True if a rank or the store is gone: there is no more replication."""
        return bool(self._failure)

    def reserve_encrypted(self, num_bytes: int) -> Arena | None:
        """Return memory for this rank's encrypted file of the next save; None: there is none."""
        self._encrypted = None
        if self._memory_dir is not None:
            name = replica_slots.sealed_slot(self._rank)
            new = replica_slots.DoubleBuffer(self._memory_dir, name, anew=True)
            slot = self._slots.setdefault(name, new)
            with contextlib.suppress(OSError):
                arena = slot.free(self.newest)
                arena.reserve(num_bytes)
                self._encrypted = arena
        return self._encrypted

    def encrypted_bytes(self) -> tuple[int, int]:
        """Return the bytes that `reserve_encrypted` holds already for the next save, and in all."""
        slot = self._slots.get(replica_slots.sealed_slot(self._rank))
        return slot.capacity_bytes(self.newest) if slot is not None else (0, 0)

    @property
    def has_encrypted(self) -> bool:
        """True if this rank's encrypted file of the save in flight lies in memory."""
        return self._encrypted is not None

    def replicate(
        self, name: SnapshotName, whole: Manifest | None, mine: memoryview | None
    ) -> None:
        """Replicate a save. Every rank, for each save with reports from all ranks.

        Args:
            name: Name of the snapshot.
            whole: Its manifest, on rank 0.
            mine: This rank's complete file; None if it lies in no memory. In an encrypted run the
                file from `reserve_encrypted` is used instead.

        Raises:
            ReplicationFailed: on all ranks alike.
        """
        key = f"keep/{name.sequence}"
        with self._all_or_none():
            # Two keys in turn: no rank still reads the one before.
            manifest = self._share(key, f"keep/manifest/{name.sequence % 2}", whole)
            if manifest.encryption is not None and mine is not None:
                mine = self._encrypted.memory if self._encrypted is not None else None
            self._replicate(key, manifest, mine, self._encrypted)
            self._delete_keys(name.sequence)
        self._release(name.folder)
        self._drop_fetched()

    def replicate_stored(self, stored: StoredSnapshot) -> int:
        """Replicate the snapshot that the attempt began from. Every rank, once, before `replicate`.

        Returns:
            Number of ranks with lost replicas; if 0, nothing was done.

        Raises:
            ReplicationFailed: on all ranks alike.
        """
        key, manifest_key, why, whole = "keep/again", "keep/manifest/again", "", None
        self.newest = stored.name.folder
        with self._all_or_none(once=True):
            if self._rank == 0:
                try:
                    whole = stored.manifest()
                except (TrainckptError, OSError) as error:
                    why = self._because(error)
            manifest, lacks, why = self._share(key, manifest_key, whole, why), False, ""
            try:
                self._check_wanted()
                lacks = stored.is_incomplete(manifest, names(self.plan, self._rank, manifest))
            except Exception as error:  # noqa: BLE001 - the others wait for an answer
                why = self._because(error)
            lacking = self._agree(f"{key}/lacking", why, RANKS_TIMEOUT_S, lacks=lacks)
            if lacking:
                with contextlib.ExitStack() as stack:
                    mine = None
                    try:
                        mine = stack.enter_context(stored.file(manifest, self._check_wanted))
                    except Exception as error:  # noqa: BLE001 - the others wait for an answer
                        why = self._because(error)
                    self._replicate(key, manifest, mine, None, why)
                self._release(manifest.name.folder)
            if self._rank == 0:
                self._channel.forget([manifest_key])  # all have read it
        return lacking

    def _because(self, error: Exception) -> str:
        known = isinstance(error, (OSError, TrainckptError))
        return f"rank {self._rank}: {getattr(error, 'message', error if known else repr(error))}"

    @contextlib.contextmanager
    def _all_or_none(self, *, once: bool = False) -> Iterator[None]:
        """Turn a failure on any rank into `ReplicationFailed` on all.

        `once`: a late rank need not be gone, and this is not tried again.
        """
        if self._failure:
            raise ReplicationFailed(self._failure)
        try:
            yield
        except NoAgreement as error:
            if once:
                self._leave_groups()
            else:
                self._failure = error.message
            raise ReplicationFailed(error.message) from error
        except ReplicationFailed:
            self._leave_groups()
            if self.newest is not None:
                self._release_manifests(self.newest)  # but what others made stands
            raise

    def _release_manifests(self, newest: str) -> None:
        """Remove all manifests but the newest, unless a newer snapshot may be adding its own."""
        if (
            self._is_first_on_host
            and self._memory_dir is not None
            and not self._superseded.is_set()
        ):
            replica_slots.release_manifests(self._memory_dir, [newest])

    def _replicate(
        self,
        key: str,
        manifest: Manifest,
        mine: memoryview | None,
        sealed: Arena | None,
        why: str = "",
    ) -> None:
        """Do steps 1 to 3, on all ranks or none."""
        longest = max(file.num_bytes for file in manifest.files)
        limit_s = BARRIER_S + longest / SLOWEST_BYTES_PER_S
        memories: dict[str, Arena] = {}
        why = why or self._reserve(manifest, mine, memories)
        self._agree(f"{key}/ready", why, limit_s)
        try:
            assert mine is not None
            self._exchange(key, manifest, mine, memories)
            self._publish(manifest, memories, sealed)
        except (TrainckptError, OSError) as error:
            why = self._because(error)
            self._leave_groups()  # ranks that wait for this one see it at once
        self._agree(f"{key}/done", why, limit_s)

    def close(self, *, keep: bool) -> None:
        """End the attempt; `keep` the replicas held for other ranks."""
        self._leave_groups()
        for slot in self._slots.values():
            slot.close(keep=keep)
        if not keep:
            self._drop_fetched()
            if self._is_first_on_host and self._memory_dir is not None:
                replica_slots.release_manifests(self._memory_dir, ())

    def _share(
        self, key: str, manifest_key: str, whole: Manifest | None, why: str = ""
    ) -> Manifest:
        if self._rank == 0 and whole is not None:
            self._channel.put(manifest_key, manifests.dump(whole).decode())
        self._agree(f"{key}/manifest", why, RANKS_TIMEOUT_S)
        data = self._channel.peek(manifest_key).encode()
        return manifests.load(data, "the manifest of what is kept")

    def _agree(self, key: str, why: str, limit_s: float, *, lacks: bool = False) -> int:
        """Raise `ReplicationFailed` on all ranks if any has a reason; else count those that lack.

        Only replicas of the snapshot from which the attempt began can be lacking.
        """
        answer = {"why": why, "lacks": int(lacks)}
        verdict = self._channel.fold(key, answer, _all_of, limit_s)
        if verdict["why"]:
            raise ReplicationFailed(verdict["why"])
        return int(verdict["lacks"])

    def _delete_keys(self, sequence: int) -> None:
        """Delete store keys read by all ranks, also those of earlier failed saves.

        All ranks have come to the end of this save.
        """
        before = range(self._first_undeleted, sequence)
        stages = [f"keep/{n}/{stage}" for n in before for stage in ("manifest", "ready", "done")]
        stages += [f"keep/{sequence}/manifest", f"keep/{sequence}/ready"]
        keys = [f"{stage}/{self._rank}" for stage in stages]
        if self._rank == 0:
            keys += [key for stage in stages for key in self._channel.fold_keys(stage)]
        self._channel.forget(keys)
        self._first_undeleted = sequence

    def _reserve(self, manifest: Manifest, mine: memoryview | None, into: dict[str, Arena]) -> str:
        """Reserve memory for the replicas this rank holds; return why there is none, or ""."""
        if mine is None or self._memory_dir is None:
            return f"rank {self._rank} has too little shared memory"
        sizes = {copy_slot(o): manifest.files[o].num_bytes for o in self.plan.kept_by(self._rank)}
        for number, coded in sets_of(self.plan, self._rank):
            chunk_bytes = coded.chunk_bytes(max(file_sizes(coded, manifest)))
            sizes[parity_slot(number)] = HEAD_BYTES + coded.num_parity * chunk_bytes
        try:
            for name, num_bytes in sizes.items():
                slot = self._slots.setdefault(
                    name, replica_slots.DoubleBuffer(self._memory_dir, name)
                )
                into[name] = slot.free(self.newest)
                into[name].reserve(num_bytes)
        except OSError as error:
            return f"rank {self._rank} has too little memory for the copies of others ({error})"
        return ""

    def _exchange(
        self, key: str, manifest: Manifest, mine: memoryview, into: dict[str, Arena]
    ) -> None:
        """Do step 2; the memory then holds whole and verified replicas."""
        self._join_groups(key)
        owners = self.plan.kept_by(self._rank)
        copies = [(self._groups[copy_slot(o)], into[copy_slot(o)].memory) for o in owners]
        copy_files(mine, self._groups.get(copy_slot(self._rank)), copies, self._check_wanted)
        for owner in owners:
            file = manifest.files[owner]
            if not is_file(into[copy_slot(owner)].memory, file):
                why = f"the received copy of {file.name} does not match its digest"
                raise UnusableSnapshot(why)
        for number, coded in sets_of(self.plan, self._rank):
            memory, place = into[parity_slot(number)].memory, coded.members.index(self._rank)
            sizes, own = file_sizes(coded, manifest), mine if place < coded.num_own else mine[:0]
            make_parities(
                coded,
                place,
                sizes=sizes,
                mine=own,
                into=memory[HEAD_BYTES:],
                group=self._groups[parity_slot(number)],
                may_go_on=self._check_wanted,
            )
            head = ParityHead(
                snapshot=str(manifest.name),
                number=number,
                members=coded.members,
                num_own=coded.num_own,
                num_parity=coded.num_parity,
                place=place,
                chunk_bytes=coded.chunk_bytes(max(sizes)),
                parities=digest(memory[HEAD_BYTES:]),
            )
            memory[:HEAD_BYTES] = parity_file.dump(head)

    def _join_groups(self, key: str) -> None:
        """Connect to the members of this rank's groups, in one order on all ranks."""
        if self._groups:
            return
        partners = dict(enumerate(self.plan.partners))
        wanted: dict[str, tuple[int, ...]] = {
            copy_slot(o): (o, p) for o, p in partners.items() if self._rank in (o, p)
        }
        for number, coded in sets_of(self.plan, self._rank):
            wanted[parity_slot(number)] = coded.members
        for name, members in wanted.items():
            self._check_wanted()
            self._groups[name] = Exchange(self._channel, f"{key}/groups/{name}", members, STEP_S)

    def _publish(
        self, manifest: Manifest, memories: dict[str, Arena], sealed: Arena | None
    ) -> None:
        """Do step 3: publish the replicas under their names."""
        folder, is_sealed = manifest.name.folder, manifest.encryption is not None
        if is_sealed and sealed is not None:
            sealed.publish(folder, sealed_file_name(self._rank))
        name_of = file_name(manifest)
        for owner in self.plan.kept_by(self._rank):
            memories[copy_slot(owner)].publish(folder, name_of(owner))
        for number, coded in sets_of(self.plan, self._rank):
            place = coded.members.index(self._rank)
            memories[parity_slot(number)].publish(folder, parity_file.file_name(number, place))
        if self._is_first_on_host and self._memory_dir is not None:
            replica_slots.write_manifest(self._memory_dir, folder, manifests.dump(manifest))

    def _release(self, newest: str) -> None:
        self.newest = newest
        for slot in self._slots.values():
            slot.release(newest)
        self._release_manifests(newest)

    def _drop_fetched(self) -> None:
        """Remove memory fetched for `replicate_stored`, in this attempt or one before."""
        if self._memory_dir is not None:
            replica_slots.remove_slot(self._memory_dir, replica_slots.fetched_slot(self._rank))

    def _check_wanted(self) -> None:
        if self._paused.is_set():
            raise NoAgreement("the final save needs the network")
        if self._superseded.is_set():
            raise NoAgreement("a newer snapshot is being replicated")

    def _leave_groups(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}


def _all_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "why": "; ".join(answer["why"] for answer in answers if answer["why"])[:1000],
        "lacks": sum(answer["lacks"] for answer in answers),
    }


# ---- failure domains: the ranks that fail together, and the plan made from them


def set_up(
    options: Options, channel: RankStore, run: str, hosts: Sequence[str]
) -> Replicator | None:
    """Return this rank's replicator, or None if no replication was asked for. Collective.

    Args:
        options: The same redundancy on every rank, and each host's own failure domain.
        channel: Fresh keys.
        run: Run directory, which names its shared memory.
        hosts: Host of every rank.

    Raises:
        ConfigurationError: parity is wanted, and NumPy is not installed.
    """
    spec = options.redundancy
    if spec.kind == NOTHING and options.memory_every.steps is None:
        return None
    if spec.kind == PARITY:
        parity.check_available()
    declared = channel.gather("failure domains", options.failure_domain or "", RANKS_TIMEOUT_S)
    plan = make_plan(spec, domains_of(hosts, declared))
    if channel.world.rank == 0:
        for warning in plan.warnings:
            logger.warning("%s", warning)
        if plan.partners:
            logger.debug("each rank's file is copied to a rank of another host")
        elif plan.sets:
            sizes = sorted({len(coded.members) for coded in plan.sets})
            logger.info(
                "ranks of other hosts keep parities of each rank's file, in sets of %s: any %d "
                "of the hosts may be lost",
                " or ".join(map(str, sizes)),
                plan.num_losses,
            )
    return Replicator(plan, channel, run, hosts)


def set_up_local(channel: RankStore, run: str, hosts: Sequence[str]) -> Replicator:
    """Return a replicator like that of `set_up`, for a rank whose file stays on its own host."""
    return Replicator(make_plan(RedundancySpec(), list(hosts)), channel, run, hosts)


def domains_of(hosts: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return each rank's failure domain: as its host's first rank declares, or the host itself.

    Ranks of one host always share a domain, since they share the memory that holds the replicas.
    """
    first: dict[str, str] = {}
    for host, name in zip(hosts, declared, strict=True):
        first.setdefault(host, name or f"host {host}")
    return [first[host] for host in hosts]
