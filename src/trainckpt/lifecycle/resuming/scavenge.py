"""Scavenge: what the last attempt kept in the memory of its hosts is brought to the run's place.

    first of each host   tells which snapshots its memory holds, with their manifest
                         BARRIER  rank 0 says which are newer than the newest commit, and of the
                                  run's own branch; none as a rule: that is all there is to do
    for each, newest first, until one is whole:
    first of each host   verifies what it holds of it: shard files, copies, parities
                         BARRIER  all know who holds what; if too much is lost it is refused
    all of them          rebuild what is lost on a host that has nothing of it (`recover`), write
                         the shard files to the run's place
                         BARRIER  rank 0 commits. From now on it is a snapshot like any other, for
                                  as many ranks as there are, in whatever layout

Of an encrypted run all this is done with the files as they are encrypted: no key is asked for.

A host that was replaced brings nothing, and gets what it needs as from any snapshot. Whatever goes
wrong is said, and the newest commit stands.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TierUnavailable, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import names, parity_file
from trainckpt.format.checking import is_file
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S, Seat, leaders
from trainckpt.lifecycle.run.error_json import together
from trainckpt.lifecycle.run.log import logger
from trainckpt.ranks.exchange import Exchange
from trainckpt.snapshot import attempts as attempt_records
from trainckpt.snapshot import catalog
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.memory_copies import read_parity
from trainckpt.snapshot.recover import Left, Stock, recover
from trainckpt.snapshot.redundancy import CodedSet
from trainckpt.tiers import kept
from trainckpt.tiers.memory import MemoryPlace, MemoryTaken

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.parity_file import ParityHead
    from trainckpt.ranks.channel import Channel
    from trainckpt.tiers.base import Tier

EXCHANGE_S = 60.0
ALONE_WITHIN_S = 540.0  # less than others wait for this rank
SAID_AFTER_S = 5.0
QUICKER_S = 0.02  # whoever was quicker has the lock for longer than that
MOST = 4  # snapshots of a host that are looked at


@dataclass
class Found:
    """What lies in this host's memory of one snapshot, verified.

    Attributes:
        files: Rank -> the bytes of its shard file.
        parities: Of each parity file, what it says of itself and its parities.
        close: Gives all of it back.
    """

    files: dict[int, memoryview] = field(default_factory=dict)
    parities: list[tuple[ParityHead, memoryview]] = field(default_factory=list)
    close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def to_json(self) -> dict[str, Any]:
        """As the others are told."""
        heads = [{**vars(head), "members": list(head.members)} for head, _ in self.parities]
        return {"files": sorted(self.files), "parities": heads}


@dataclass(frozen=True)
class Whereabouts:
    """Who holds what of one snapshot, as all ranks know it.

    Attributes:
        files: Rank of a shard file -> the first rank whose host holds it.
        sets: What is left of each set in which a file is lost.
        rebuilder: Who rebuilds.
    """

    files: Mapping[int, int]
    sets: Sequence[Left]
    rebuilder: int


def scavenge(
    tier: Tier,
    channel: Channel,
    run: str,
    seats: Sequence[Seat],
    alone_within_s: float = ALONE_WITHIN_S,
) -> SnapshotName | None:
    """Bring the newest snapshot that is in memory alone to the run's place. Every rank calls it.

    Returns:
        Its name, committed; None if there is none, or none is whole.

    Raises:
        NoAgreement: a rank is gone.
        TierUnavailable: rank 0 cannot read the run's place; or another process brings what a host
            holds, and has not ended within `alone_within_s`.
    """
    channel = channel.scoped("scavenge")
    place = MemoryPlace.found(tier.url) if channel.world.rank in leaders(seats) else None
    with _alone(place, alone_within_s) as is_alone:
        mine = {"snapshots": _snapshots(place), "is_alone": is_alone}
        told = channel.gather("held", mine, RANKS_TIMEOUT_S)
        if busy := [seats[rank].host for rank, each in enumerate(told) if not each["is_alone"]]:
            raise TierUnavailable(
                f"another process still brings what is in memory on {', '.join(busy)} to "
                f"{tier.url}, and two must not write the same files",
                hint="wait for it, or end it: most likely a `trainckpt run` of the attempt before",
            )
        held = [each["snapshots"] for each in told]
        return _newest(tier, channel, run, held, place) if any(held) else None


@contextlib.contextmanager
def _alone(place: MemoryPlace | None, limit_s: float) -> Iterator[bool]:
    """Whether nobody else brings what this host holds: the supervisor of the attempt before may."""
    until_s = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        is_alone = place is None or not _snapshots(place)
        while place is not None and not is_alone:
            if not place.wait_fetched(SAID_AFTER_S if limit_s > SAID_AFTER_S else limit_s):
                logger.info("another process brings what is in memory here: it is waited for")
                if not place.wait_fetched(max(until_s - time.monotonic(), 0.0)):
                    break
            try:
                stack.enter_context(place.fetching())
                is_alone = True
            except MemoryTaken:  # somebody was quicker
                if time.monotonic() > until_s:
                    break
                time.sleep(QUICKER_S)
            except OSError:  # no lock is to be had here, by anybody
                is_alone = True
        yield is_alone


def _newest(
    tier: Tier,
    channel: Channel,
    run: str,
    held: Sequence[Sequence[str]],
    place: MemoryPlace | None,
) -> SnapshotName | None:
    texts = sorted({text for each in held for text in each})
    wanted = together(
        channel, "wanted", lambda: _wanted(tier, channel, run, texts), RANKS_TIMEOUT_S
    )[0]
    for text in wanted:
        name = SnapshotName.parse(text)
        assert name is not None
        holders = [rank for rank, each in enumerate(held) if text in each]
        try:
            _bring(tier, channel.scoped(text), run, name, place, holders)
        except _Refused as refused:
            if channel.world.rank == 0:
                logger.warning("%s, kept in memory, is not whole any more: %s", name, refused)
        else:
            return name
    return None


class _Refused(Exception):
    """On all ranks alike: why a snapshot cannot be had from memory."""


def _snapshots(place: MemoryPlace | None) -> list[str]:
    """Snapshots whose manifest this host holds, the newest few."""
    if place is None:
        return []
    folders = [f for f in place.folders() if kept.MANIFEST in kept.files(place, f)]
    found = (SnapshotName.parse(folder.rpartition("/")[2]) for folder in folders)
    return [str(name) for name in sorted(name for name in found if name)[-MOST:]]


def _wanted(tier: Tier, channel: Channel, run: str, texts: Sequence[str]) -> list[str]:
    """Rank 0: those that a resume would rather begin from than from what is committed."""
    if channel.world.rank != 0:
        return []
    before = attempt_records.read_attempts(tier)
    committed = [c.name for c in catalog.read_catalog(tier, run, before) if c.usable]
    found = [name for name in map(SnapshotName.parse, texts) if name is not None]
    reach = catalog.ancestry(before, [*committed, *found])
    newest = max(committed, default=None)
    newer = [n for n in found if newest is None or n > newest]
    return [str(n) for n in sorted(newer, reverse=True) if n.sequence <= reach.get(n.attempt, -1)]


def _bring(
    tier: Tier,
    channel: Channel,
    run: str,
    name: SnapshotName,
    place: MemoryPlace | None,
    holders: Sequence[int],
) -> None:
    """Raises `_Refused` on all ranks if it cannot be done; nothing is committed then."""
    rank = channel.world.rank
    manifest = _manifest(channel, run, name, place, holders[0])
    mine = _verified(place, manifest) if place is not None else Found()
    with mine.close:
        told = channel.gather("verified", mine.to_json(), RANKS_TIMEOUT_S)
        where = _whereabouts(manifest, told, holders)
        if where.sets:
            _must(channel, "rebuilt", lambda: _rebuild(channel, manifest, where, mine, place, told))
        _must(channel, "written", lambda: _write(tier, manifest, where, mine, rank))
    _must(channel, "committed", lambda: commit(tier, manifest) if rank == 0 else None)
    if rank == 0:
        lost = sum(len(left.lost) for left in where.sets)
        how = f", {lost} of its {manifest.world} files computed from the others" if lost else ""
        logger.info("%s was kept in memory alone, and is now in %s%s", name, tier.url, how)


def _must(channel: Channel, key: str, call: Any) -> None:
    """All ranks succeed, or all refuse."""
    why = ""
    try:
        call()
    except (TrainckptError, OSError) as error:
        why = f"rank {channel.world.rank}: {getattr(error, 'message', error)}"
    reasons = [each for each in channel.gather(key, why, RANKS_TIMEOUT_S) if each]
    if reasons:
        raise _Refused("; ".join(reasons)[:500])


def _manifest(
    channel: Channel, run: str, name: SnapshotName, place: MemoryPlace | None, holder: int
) -> Manifest:
    """As the first host that has it gives it to all."""
    if channel.world.rank == holder:
        assert place is not None
        data = kept.read_manifest(place, name.folder, manifests.MAX_BYTES) or b""
        channel.put("manifest", data.decode(errors="replace"))
    text = channel.get("manifest", RANKS_TIMEOUT_S)
    try:
        manifest = manifests.load(text.encode(), f"the manifest of {name} in memory")
    except UnusableSnapshot as error:
        raise _Refused(error.message) from error
    if manifest.run != run or manifest.name != name:
        raise _Refused("its manifest is of another run or snapshot")
    return manifest


def _verified(place: MemoryPlace, manifest: Manifest) -> Found:
    """What is here of a snapshot, and is what the manifest or its own head says."""
    found, folder = Found(), manifest.name.folder
    numbers = {_called(manifest, rank): rank for rank in range(manifest.world)}
    for file in kept.files(place, folder):
        held = place.held(folder, file)
        if held is None:
            continue
        found.close.callback(held.close)
        rank, data = numbers.get(file), held.data
        if rank is not None:
            data = data[: manifest.files[rank].num_bytes]  # an arena may be longer
        if rank is not None and is_file(data, manifest.files[rank]):
            found.files[rank] = data
        elif parity_file.is_file_name(file):
            with contextlib.suppress(UnusableSnapshot):
                found.parities.append(read_parity(data, file))
    return found


def _whereabouts(
    manifest: Manifest, told: Sequence[dict[str, Any]], holders: Sequence[int]
) -> Whereabouts:
    """Pure. Raises `_Refused` if too much is lost."""
    files: dict[int, int] = {}
    for holder, each in enumerate(told):
        for rank in each["files"]:
            files.setdefault(rank, holder)
    lost = sorted(set(range(manifest.world)) - set(files))
    sets = [left for left in _sets(manifest, told, files) if left.lost]
    found = {left.coded.members[place] for left in sets for place in left.lost if left.is_enough}
    if missing := [rank for rank in lost if rank not in found]:
        raise _Refused(f"nobody has the files of rank {', '.join(map(str, missing[:20]))}, and too "
                       "little is left to compute them")  # fmt: skip
    empty = [rank for rank in holders if not told[rank]["files"]]
    return Whereabouts(files, sets, (empty or list(holders))[0])


def _sets(
    manifest: Manifest, told: Sequence[dict[str, Any]], files: Mapping[int, int]
) -> list[Left]:
    """What is left of the sets of which anybody holds a parity."""
    keepers: dict[tuple[Any, ...], dict[int, int]] = {}
    for holder, each in enumerate(told):
        for head in each["parities"]:
            key = (head["number"], tuple(head["members"]), head["num_own"], head["num_parity"],
                   head["chunk_bytes"])  # fmt: skip
            keepers.setdefault(key, {}).setdefault(head["place"], holder)
    found = []
    for (_, members, num_own, num_parity, chunk_bytes), parities in sorted(keepers.items()):
        coded = CodedSet(members, num_own, num_parity)
        if max(members) >= manifest.world:
            continue
        sizes = [manifest.files[r].num_bytes if p < num_own else 0 for p, r in enumerate(members)]
        if coded.chunk_bytes(max(sizes)) == chunk_bytes:
            there = {p: files[r] for p, r in enumerate(members) if sizes[p] and r in files}
            found.append(Left(coded, sizes, there, parities))
    return found


def _rebuild(
    channel: Channel,
    manifest: Manifest,
    where: Whereabouts,
    mine: Found,
    place: MemoryPlace | None,
    told: Sequence[dict[str, Any]],
) -> None:
    """Compute what is lost, on one host; its memory holds it then."""
    members = [r for r, each in enumerate(told) if each["files"] or each["parities"]]
    members = sorted({*members, where.rebuilder})
    rank = channel.world.rank
    if rank not in members:
        return
    places = {member: number for number, member in enumerate(members)}
    group = Exchange(channel, "group", members, EXCHANGE_S) if len(members) > 1 else None
    for told_of in where.sets:
        coded = told_of.coded
        files = {p: places[r] for p, r in told_of.files.items()}
        left = Left(coded, told_of.sizes, files,
                    {p: places[r] for p, r in told_of.parities.items()})  # fmt: skip
        stock = Stock(
            places[rank],
            {p: mine.files[r] for p, r in enumerate(coded.members) if r in mine.files},
            {h.place: data for h, data in mine.parities if h.members == coded.members},
        )
        if rank == where.rebuilder:
            stock.into = {p: _room(place, manifest, coded.members[p], mine) for p in left.lost}
        recover(left, stock, places[where.rebuilder], group)
        for p, data in stock.into.items():
            number = coded.members[p]
            if not is_file(data, manifest.files[number]):
                raise UnusableSnapshot(f"what was computed for rank {number} is not its file")
            mine.files[number] = data
    if group is not None:
        group.close()


def _called(manifest: Manifest, rank: int) -> str:
    """The name in memory of a file that is as the manifest says."""
    if manifest.encryption is not None:
        return names.sealed_file_name(rank)
    return names.shard_file_name(rank)


def _room(place: MemoryPlace | None, manifest: Manifest, number: int, mine: Found) -> memoryview:
    """Memory for a file; at best such as this host's ranks will find it in."""
    file = manifest.files[number]
    if place is not None:
        for spare in range(2):
            with contextlib.suppress(MemoryTaken, OSError):
                path = place.path_of(number, spare)
                if manifest.encryption is not None:
                    path = kept.arena_path(place, kept.sealed_slot(number), spare)
                arena = place.open_arena(path)
                mine.close.callback(arena.close)
                if not arena.holds():
                    arena.reserve(file.num_bytes)
                    called = _called(manifest, number)
                    mine.close.callback(arena.publish, manifest.name.folder, called)
                    return arena.memory
    return memoryview(bytearray(file.num_bytes))


def _write(tier: Tier, manifest: Manifest, where: Whereabouts, mine: Found, rank: int) -> None:
    """This rank's share of the files, to the run's place."""
    for number, data in sorted(mine.files.items()):
        if where.files.get(number, where.rebuilder) == rank:
            key = f"{manifest.name.folder}/{manifest.files[number].name}"
            tier.remove(key)
            tier.write_parts(key, len(data), [(0, data)])
