"""Read the files that all ranks need from their tier once, into every host's shared memory.

On one host each rank reads its share of the shard files into the host's memory. With several hosts
and an object store, where each byte read costs time and money:

    every rank   reports its host's files in memory, and its free room
    all          compute the same plan: one reader per file, one taker on every other host
    readers      read their files; takers make room
                 BARRIER  all know the files read and the room made
    all          pass the files on, host to host, over a group of their own
                 BARRIER  every transfer is done

Nothing is verified here, and nothing depends on the result: each consumer verifies every digest,
and reads a missing or bad file from the tier itself.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.attempt.log import logger
from trainckpt.errors import NoAgreement, TrainckptError
from trainckpt.ranks import exchange
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.snapshot.fetch import fetch, held_bytes, is_shared, is_there, room_for
from trainckpt.storage.host_resources import has_room, training_bytes
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore
    from trainckpt.storage.arena import Arena
    from trainckpt.storage.base import Readable, Tier
    from trainckpt.storage.shared_memory import SharedMemoryDir
    from trainckpt.storage.tiered_reader import TieredReader

FETCHED_WITHIN_S = 120.0
FETCHED_FROM_BYTES = 8 << 20  # reading fewer bytes is quicker than sharing them
FROM_A_STORE_BYTES = 1 << 20  # the same, where a request takes tens of milliseconds
MAX_RANKS = 256  # limit for passing files on: each rank connects to all others
EXCHANGE_S = 60.0


class HostFetch(NamedTuple):
    """One file's transfer between hosts.

    Attributes:
        number: Number of the file.
        reader: Rank with the file in its host's memory, or the rank that reads it there.
        takers: One rank of each host that lacks the file.
    """

    number: int
    reader: int
    takers: tuple[int, ...]


def plan_passing(
    num_files: int, hosts: Sequence[str], in_memory: Mapping[str, Sequence[int]]
) -> list[HostFetch]:
    """Assign a reader and takers to each file. Pure. Files held by every host are left out.

    Args:
        num_files: Number of files in the snapshot.
        hosts: Host of each rank.
        in_memory: Host -> numbers of the files in its memory.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    names = list(ranks_of)
    fetches = []
    for number in range(num_files):
        lacking = [host for host in names if number not in in_memory.get(host, ())]
        if not lacking:
            continue
        having = [host for host in names if host not in lacking]
        home = having[number % len(having)] if having else names[number % len(names)]
        turn = number // len(names)
        of = {host: ranks[turn % len(ranks)] for host, ranks in ranks_of.items()}
        takers = tuple(of[host] for host in lacking if host != home)
        fetches.append(HostFetch(number, of[home], takers))
    return fetches


def fetch_together(
    *,
    source: Readable,
    ladder: TieredReader,
    place: SharedMemoryDir | None,
    channel: RankStore,
    hosts: Sequence[str],
    name: SnapshotName,
    load: Callable[[], Manifest],
) -> None:
    """Bring the files that all ranks need into the memory of all hosts. Every rank calls it.

    Every rank waits for all, whatever its own host holds: another may have memory, or more ranks.

    Args:
        source: Tier to read from; it decrypts encrypted files.
        ladder: The tiers beneath it.
        place: This host's shared memory of the run, if any.
        channel: Fresh keys.
        hosts: Host of each rank.
        name: The snapshot's name.
        load: Reads the manifest; its errors are left to the later reader.
    """
    me = channel.world.rank
    local = [rank for rank, host in enumerate(hosts) if host == hosts[me]]
    came = place is None or place.wait_fetched(FETCHED_WITHIN_S)
    if not came and me == local[0]:
        logger.warning(
            "another process has been reading into shared memory for %.0f s, reading %s without it",
            FETCHED_WITHIN_S,
            name,
        )
    manifest = None
    if place is not None and len(hosts) > 1:
        with contextlib.suppress(TrainckptError, OSError):  # the later read reports the error
            manifest = _worth_it(ladder, place, load(), len(local) / len(hosts))
    if len(local) < len(hosts) and _between_hosts(
        source=source, ladder=ladder, place=place, channel=channel, hosts=hosts, manifest=manifest
    ):
        return
    if place is not None and manifest is not None and len(local) > 1:
        share = range(local.index(me), len(manifest.files), len(local))
        fetch(source, place, manifest, share)
    channel.gather("fetched", True, RANKS_TIMEOUT_S)


def _worth_it(
    ladder: TieredReader, place: SharedMemoryDir, manifest: Manifest, share: float
) -> Manifest | None:
    """`share`: of all ranks, those of this host."""
    total = sum(file.num_bytes for file in manifest.files)
    least = FETCHED_FROM_BYTES if is_directory(ladder, manifest) else FROM_A_STORE_BYTES
    if total < least or not is_shared(manifest):
        return None
    training = training_bytes(int(held_bytes(manifest) * share))
    return manifest if has_room(place, total, training) else None


def is_directory(ladder: TieredReader, manifest: Manifest) -> bool:
    """Return True if the snapshot's first file is read from a directory."""
    key = f"{manifest.name.folder}/{manifest.files[0].name}"
    tier: Tier = ladder.tiers[ladder.number_of(key)]
    return isinstance(tier, LocalTier)


def _between_hosts(
    *,
    source: Readable,
    ladder: TieredReader,
    place: SharedMemoryDir | None,
    channel: RankStore,
    hosts: Sequence[str],
    manifest: Manifest | None,
) -> bool:
    """Return True if files were passed between hosts; False: each host reads everything itself."""
    me = channel.world.rank
    mine: dict[str, Any] = {"can": False, "held": []}
    with contextlib.suppress(TrainckptError, OSError):
        if place is not None and manifest is not None and exchange.is_there():
            numbers = range(len(manifest.files))
            mine["held"] = [n for n in numbers if is_there(place, manifest, n)]
            mine["can"] = not is_directory(ladder, manifest)
    answers = channel.gather("held", mine, RANKS_TIMEOUT_S)
    if len(hosts) > MAX_RANKS or not all(answer["can"] for answer in answers):
        return False
    assert place is not None
    assert manifest is not None
    in_memory: dict[str, list[int]] = {}
    for host, answer in zip(hosts, answers, strict=True):
        in_memory.setdefault(host, answer["held"])
    plan = plan_passing(len(manifest.files), hosts, in_memory)
    with contextlib.ExitStack() as stack:
        has, room = _make_ready(
            source=source, place=place, manifest=manifest, plan=plan, me=me, stack=stack
        )
        everyone = channel.gather("fetched", {"has": has, "room": sorted(room)}, RANKS_TIMEOUT_S)
        passing = [
            (p.number, p.reader, taker)
            for p in plan
            if p.number in everyone[p.reader]["has"]
            for taker in p.takers
            if p.number in everyone[taker]["room"]
        ]
        _pass_on(
            place=place, manifest=manifest, channel=channel, passing=passing, room=room, stack=stack
        )
    channel.gather("passed", True, RANKS_TIMEOUT_S)
    return True


def _make_ready(
    *,
    source: Readable,
    place: SharedMemoryDir,
    manifest: Manifest,
    plan: Sequence[HostFetch],
    me: int,
    stack: contextlib.ExitStack,
) -> tuple[list[int], dict[int, Arena]]:
    """Read this rank's files and reserve memory for incoming ones; return both."""
    room: dict[int, Arena] = {}
    for item in plan:
        if me in item.takers and (arena := room_for(place, manifest, item.number)) is not None:
            room[item.number] = arena
            stack.callback(arena.close)
    own = [item.number for item in plan if item.reader == me]
    with contextlib.suppress(TrainckptError, OSError):
        fetch(source, place, manifest, own)
    return [n for n in own if is_there(place, manifest, n)], room


def _pass_on(
    *,
    place: SharedMemoryDir,
    manifest: Manifest,
    channel: RankStore,
    passing: Sequence[tuple[int, int, int]],
    room: Mapping[int, Arena],
    stack: contextlib.ExitStack,
) -> None:
    """Send and receive; a host reads an untransferred file from the tier itself."""
    me = channel.world.rank
    members = sorted({rank for _, reader, taker in passing for rank in (reader, taker)})
    if me not in members:
        return
    try:
        group = exchange.Exchange(channel, "hosts", members, EXCHANGE_S)
        stack.callback(group.close)
        receives = [
            (members.index(reader), number, room[number].memory)
            for number, reader, taker in passing
            if taker == me
        ]
        sends = [
            (members.index(taker), number, data)
            for number, reader, taker in passing
            if reader == me
            for data in [_held(place, manifest, number, stack)]
        ]
        group.settle(group.begin(receives, sends))
        for _, number, _ in receives:
            room[number].publish(manifest.name.folder, manifest.files[number].name)
    except (NoAgreement, OSError) as error:
        logger.warning("could not pass files between hosts, each host reads its own: %s", error)


def _held(
    place: SharedMemoryDir, manifest: Manifest, number: int, stack: contextlib.ExitStack
) -> memoryview:
    """Return a file in this host's memory; raise `OSError` if it is gone."""
    file = manifest.files[number]
    mapped = place.held(manifest.name.folder, file.name, file.content.num_bytes)
    if mapped is None:
        raise OSError(f"{file.name} is no longer in memory")
    stack.callback(mapped.close)
    return mapped.data
