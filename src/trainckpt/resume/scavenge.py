"""Copy the last attempt's snapshots from its hosts' shared memory to the run directory.

    first of each host   reports the snapshots in its memory, with their manifests
                         BARRIER  rank 0 selects those newer than the newest commit and of the
                                  run's own branch; usually none, and the work ends here
    for each, newest first, until one is whole:
    first of each host   verifies its parts: shard files, copies, parities
                         BARRIER  all know the holder of each part; too much lost: refused
    all of them          rebuild the lost parts on a host without any of it (`recover`), write
                         the shard files to the run directory
                         BARRIER  rank 0 commits. The snapshot is now like any other, for any
                                  number of ranks in any layout

The files of an encrypted run stay encrypted throughout: no key is needed.

A replaced host contributes nothing, and reads its part as from any snapshot. Every failure is
logged, and the newest commit stands.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import TierUnavailable, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import names, parity_file
from trainckpt.format.digest_check import is_file
from trainckpt.format.names import SnapshotName
from trainckpt.ranks.exchange import Exchange
from trainckpt.ranks.store import RANKS_TIMEOUT_S, gather_or_raise
from trainckpt.run_directory.validate import RankLocation, leaders
from trainckpt.snapshot import attempt_history as attempt_records
from trainckpt.snapshot import catalog
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.peer_transfer import LocalParts, SetState, recover
from trainckpt.snapshot.redundancy import CodedSet
from trainckpt.snapshot.verify import read_parity
from trainckpt.storage import replica_slots
from trainckpt.storage.shared_memory import ArenaInUse, SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.parity_file import ParityHead
    from trainckpt.ranks.store import RankStore
    from trainckpt.storage.base import Tier

EXCHANGE_S = 60.0
ALONE_WITHIN_S = 540.0  # less than others wait for this rank
SAID_AFTER_S = 5.0
QUICKER_S = 0.02  # a quicker process holds the lock for longer than that
MOST = 4  # snapshots of a host to consider


@dataclass
class ScavengedCopy:
    """Verified parts of one snapshot in this host's memory.

    Attributes:
        files: Rank -> the bytes of its shard file.
        parities: The header and the contents of each parity file.
        close: Releases all of it.
    """

    files: dict[int, memoryview] = field(default_factory=dict)
    parities: list[tuple[ParityHead, memoryview]] = field(default_factory=list)
    close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def to_json(self) -> dict[str, Any]:
        """Return the summary sent to the other ranks."""
        heads = [{**vars(head), "members": list(head.members)} for head, _ in self.parities]
        return {"files": sorted(self.files), "parities": heads}


@dataclass(frozen=True)
class CopyLocations:
    """Holders of one snapshot's parts, the same on all ranks.

    Attributes:
        files: Rank of a shard file -> the first rank whose host holds it.
        sets: Remains of each set with a lost file.
        rebuilder: The rank that rebuilds.
    """

    files: Mapping[int, int]
    sets: Sequence[SetState]
    rebuilder: int


def scavenge(
    tier: Tier,
    channel: RankStore,
    run: str,
    seats: Sequence[RankLocation],
    alone_within_s: float = ALONE_WITHIN_S,
) -> SnapshotName | None:
    """Copy the newest snapshot that exists only in memory to the run directory. Every rank calls
    it.

    Returns:
        Its name, committed; None if there is none, or none is whole.

    Raises:
        NoAgreement: a rank is gone.
        TierUnavailable: rank 0 cannot read the run directory; or another process is copying a
            host's snapshots and has not ended within `alone_within_s`.
    """
    channel = channel.scoped("scavenge")
    place = SharedMemoryDir.found(tier.url) if channel.world.rank in leaders(seats) else None
    with _alone(place, alone_within_s) as is_alone:
        mine = {"snapshots": _snapshots(place), "is_alone": is_alone}
        answers = channel.gather("held", mine, RANKS_TIMEOUT_S)
        if busy := [seats[r].host for r, answer in enumerate(answers) if not answer["is_alone"]]:
            raise TierUnavailable(
                f"another process still copies snapshots from memory on {', '.join(busy)} to "
                f"{tier.url}; two must not write the same files",
                hint="wait for it or end it; most likely it is `trainckpt run` of the last attempt",
            )
        snapshots = [answer["snapshots"] for answer in answers]
        return _newest(tier, channel, run, snapshots, place) if any(snapshots) else None


@contextlib.contextmanager
def _alone(place: SharedMemoryDir | None, limit_s: float) -> Iterator[bool]:
    """Wait until no other process copies this host's snapshots, such as the last attempt's
    supervisor.

    Yields True if this process is alone.
    """
    until_s = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        is_alone = place is None or not _snapshots(place)
        while place is not None and not is_alone:
            if not place.wait_fetched(SAID_AFTER_S if limit_s > SAID_AFTER_S else limit_s):
                logger.debug("waiting for another process that copies snapshots from memory")
                if not place.wait_fetched(max(until_s - time.monotonic(), 0.0)):
                    break
            try:
                stack.enter_context(place.fetching())
                is_alone = True
            except ArenaInUse:  # another process was quicker
                if time.monotonic() > until_s:
                    break
                time.sleep(QUICKER_S)
            except OSError:  # the file system has no locks
                is_alone = True
        yield is_alone


def _newest(
    tier: Tier,
    channel: RankStore,
    run: str,
    snapshots: Sequence[Sequence[str]],
    place: SharedMemoryDir | None,
) -> SnapshotName | None:
    texts = sorted({text for of_rank in snapshots for text in of_rank})
    wanted = gather_or_raise(
        channel, "wanted", lambda: _wanted(tier, channel, run, texts), RANKS_TIMEOUT_S
    )[0]
    for text in wanted:
        name = SnapshotName.parse(text)
        assert name is not None
        holders = [rank for rank, of_rank in enumerate(snapshots) if text in of_rank]
        try:
            _bring(
                tier=tier,
                channel=channel.scoped(text),
                run=run,
                name=name,
                place=place,
                holders=holders,
            )
        except _Refused as refused:
            if channel.world.rank == 0:
                logger.warning("%s in memory is no longer complete: %s", name, refused)
        else:
            return name
    return None


class _Refused(Exception):
    """The snapshot cannot be recovered from memory; raised on all ranks alike."""


def _snapshots(place: SharedMemoryDir | None) -> list[str]:
    """Return the names of the newest few snapshots whose manifest this host holds."""
    if place is None:
        return []
    folders = [
        f for f in place.folders() if replica_slots.MANIFEST in replica_slots.files(place, f)
    ]
    parsed = (SnapshotName.parse(folder.rpartition("/")[2]) for folder in folders)
    return [str(name) for name in sorted(name for name in parsed if name)[-MOST:]]


def _wanted(tier: Tier, channel: RankStore, run: str, texts: Sequence[str]) -> list[str]:
    """Return on rank 0 the snapshots a resume prefers to the newest commit, newest first."""
    if channel.world.rank != 0:
        return []
    before = attempt_records.read_attempts(tier)
    committed = [c.name for c in catalog.read_catalog(tier, run, before) if c.usable]
    in_memory = [name for name in map(SnapshotName.parse, texts) if name is not None]
    reach = catalog.ancestry(before, [*committed, *in_memory])
    newest = max(committed, default=None)
    newer = [n for n in in_memory if newest is None or n > newest]
    return [str(n) for n in sorted(newer, reverse=True) if n.sequence <= reach.get(n.attempt, -1)]


def _bring(
    *,
    tier: Tier,
    channel: RankStore,
    run: str,
    name: SnapshotName,
    place: SharedMemoryDir | None,
    holders: Sequence[int],
) -> None:
    """Copy one snapshot to the run directory. Raise `_Refused` on all ranks if impossible;
    nothing is committed then."""
    rank = channel.world.rank
    manifest = _manifest(channel, run, name, place, holders)
    mine = _verified(place, manifest) if place is not None else ScavengedCopy()
    with mine.close:
        answers = channel.gather("verified", mine.to_json(), RANKS_TIMEOUT_S)
        where = _whereabouts(manifest, answers, holders)
        if where.sets:
            _must(
                channel,
                "rebuilt",
                lambda: _rebuild(
                    channel=channel,
                    manifest=manifest,
                    where=where,
                    mine=mine,
                    place=place,
                    answers=answers,
                ),
            )
        _must(channel, "written", lambda: _write(tier, manifest, where, mine, rank))
    _must(channel, "committed", lambda: commit(tier, manifest) if rank == 0 else None)
    if rank == 0:
        lost = sum(len(left.lost) for left in where.sets)
        how = f", {lost} of its {manifest.world} files rebuilt from the others" if lost else ""
        logger.info("rescued %s from memory to %s%s", name, tier.url, how)


def _must(channel: RankStore, key: str, call: Any) -> None:
    """Run `call` on all ranks; if any fails, all refuse."""
    why = ""
    try:
        call()
    except (TrainckptError, OSError) as error:
        why = f"rank {channel.world.rank}: {getattr(error, 'message', error)}"
    reasons = [reason for reason in channel.gather(key, why, RANKS_TIMEOUT_S) if reason]
    if reasons:
        raise _Refused("; ".join(reasons)[:500])


def _manifest(
    channel: RankStore,
    run: str,
    name: SnapshotName,
    place: SharedMemoryDir | None,
    holders: Sequence[int],
) -> Manifest:
    """Return the manifest, sent to all ranks by the first host that has a good one."""
    why = ""
    for holder in holders:
        key = f"manifest/{holder}"
        if channel.world.rank == holder:
            assert place is not None
            data = replica_slots.read_manifest(place, name.folder, manifests.MAX_BYTES) or b""
            channel.put(key, data.decode(errors="replace"))
        text = channel.get(key, RANKS_TIMEOUT_S)
        try:
            manifest = manifests.load(text.encode(), f"the manifest of {name} in memory")
        except UnusableSnapshot as error:
            why = why or error.message
            continue
        if manifest.run == run and manifest.name == name:
            return manifest
        why = why or "its manifest belongs to another run or snapshot"
    raise _Refused(why)


def _verified(place: SharedMemoryDir, manifest: Manifest) -> ScavengedCopy:
    """Return this host's parts that agree with the manifest or their own header."""
    own, folder = ScavengedCopy(), manifest.name.folder
    numbers = {_called(manifest, rank): rank for rank in range(manifest.world)}
    for file in replica_slots.files(place, folder):
        mapped = place.held(folder, file)
        if mapped is None:
            continue
        own.close.callback(mapped.close)
        rank, data = numbers.get(file), mapped.data
        if rank is not None:
            data = data[: manifest.files[rank].num_bytes]  # an arena may be longer
        if rank is not None and is_file(data, manifest.files[rank]):
            own.files[rank] = data
        elif parity_file.is_file_name(file):
            with contextlib.suppress(UnusableSnapshot):
                own.parities.append(read_parity(data, file))
    return own


def _whereabouts(
    manifest: Manifest, answers: Sequence[dict[str, Any]], holders: Sequence[int]
) -> CopyLocations:
    """Locate the parts. Pure. Raise `_Refused` if too much is lost."""
    files: dict[int, int] = {}
    for holder, answer in enumerate(answers):
        for rank in answer["files"]:
            files.setdefault(rank, holder)
    lost = sorted(set(range(manifest.world)) - set(files))
    sets = [left for left in _sets(manifest, answers, files) if left.lost]
    rebuilt = {left.coded.members[place] for left in sets for place in left.lost if left.is_enough}
    if missing := [rank for rank in lost if rank not in rebuilt]:
        raise _Refused(
            f"the files of rank {', '.join(map(str, missing[:20]))} are lost, and too few others "
            "are left to rebuild them"
        )
    empty = [rank for rank in holders if not answers[rank]["files"]]
    return CopyLocations(files, sets, (empty or list(holders))[0])


def _sets(
    manifest: Manifest, answers: Sequence[dict[str, Any]], files: Mapping[int, int]
) -> list[SetState]:
    keepers: dict[tuple[Any, ...], dict[int, int]] = {}
    for holder, answer in enumerate(answers):
        for head in answer["parities"]:
            key = (
                head["number"],
                tuple(head["members"]),
                head["num_own"],
                head["num_parity"],
                head["chunk_bytes"],
            )
            keepers.setdefault(key, {}).setdefault(head["place"], holder)
    sets = []
    for (_, members, num_own, num_parity, chunk_bytes), parities in sorted(keepers.items()):
        coded = CodedSet(members, num_own, num_parity)
        if max(members) >= manifest.world:
            continue
        sizes = [manifest.files[r].num_bytes if p < num_own else 0 for p, r in enumerate(members)]
        if coded.chunk_bytes(max(sizes)) == chunk_bytes:
            there = {p: files[r] for p, r in enumerate(members) if sizes[p] and r in files}
            sets.append(SetState(coded, sizes, there, parities))
    return sets


def _rebuild(
    *,
    channel: RankStore,
    manifest: Manifest,
    where: CopyLocations,
    mine: ScavengedCopy,
    place: SharedMemoryDir | None,
    answers: Sequence[dict[str, Any]],
) -> None:
    members = [r for r, answer in enumerate(answers) if answer["files"] or answer["parities"]]
    members = sorted({*members, where.rebuilder})
    rank = channel.world.rank
    if rank not in members:
        return
    places = {member: number for number, member in enumerate(members)}
    group = Exchange(channel, "group", members, EXCHANGE_S) if len(members) > 1 else None
    for coded_set in where.sets:
        coded = coded_set.coded
        files = {p: places[r] for p, r in coded_set.files.items()}
        left = SetState(
            coded, coded_set.sizes, files, {p: places[r] for p, r in coded_set.parities.items()}
        )
        stock = LocalParts(
            places[rank],
            {p: mine.files[r] for p, r in enumerate(coded.members) if r in mine.files},
            {h.place: data for h, data in mine.parities if h.members == coded.members},
        )
        into = {}
        if rank == where.rebuilder:
            into = {p: _room(place, manifest, coded.members[p], mine) for p in left.lost}
        recover(left, stock, rebuilder=places[where.rebuilder], group=group, into=into)
        for p, data in into.items():
            number = coded.members[p]
            if not is_file(data, manifest.files[number]):
                raise UnusableSnapshot(
                    f"the file rebuilt for rank {number} does not match its digest"
                )
            mine.files[number] = data
    if group is not None:
        group.close()


def _called(manifest: Manifest, rank: int) -> str:
    """Return the in-memory name of a shard file that matches the manifest."""
    if manifest.encryption is not None:
        return names.sealed_file_name(rank)
    return names.shard_file_name(rank)


def _room(
    place: SharedMemoryDir | None, manifest: Manifest, number: int, mine: ScavengedCopy
) -> memoryview:
    """Return memory for a file, if possible where this host's ranks will find it."""
    file = manifest.files[number]
    if place is not None:
        for spare in range(2):
            with contextlib.suppress(ArenaInUse, OSError):
                path = place.path_of(number, spare)
                if manifest.encryption is not None:
                    path = replica_slots.arena_path(place, replica_slots.sealed_slot(number), spare)
                arena = place.open_arena(path)
                mine.close.callback(arena.close)
                if not arena.holds():
                    arena.reserve(file.num_bytes)
                    called = _called(manifest, number)
                    mine.close.callback(arena.publish, manifest.name.folder, called)
                    return arena.memory
    return memoryview(bytearray(file.num_bytes))


def _write(
    tier: Tier, manifest: Manifest, where: CopyLocations, mine: ScavengedCopy, rank: int
) -> None:
    for number, data in sorted(mine.files.items()):
        if where.files.get(number, where.rebuilder) == rank:
            key = f"{manifest.name.folder}/{manifest.files[number].name}"
            tier.remove(key)
            tier.write_parts(key, len(data), [(0, data)])
