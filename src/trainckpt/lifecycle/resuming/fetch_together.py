"""Fetch together: what all ranks need of a snapshot is read from its tier once, for all of them.

On one host each rank brings its share of the shard files into the host's memory, if the ranks there
cannot read each other's (`read_shares`). With several hosts
and an object store, where each byte that is read costs time and money:

    every rank   tells what its host holds already, and whether there is room
    all          plan the same: which rank reads each file, and who takes it on every other host
    readers      bring their files; takers make room
                 BARRIER  all know what came, and where there is room
    all          pass on what came, host to host, over a group of their own
                 BARRIER  what is in memory now is there

Nothing is verified here, and nothing depends on it: whoever reads verifies every digest, and reads
from the tier itself what is not in memory, or not good.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import NoAgreement, TrainckptError
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.memory import has_room, training_bytes
from trainckpt.ranks import exchange
from trainckpt.snapshot.fetch import fetch, held_bytes, is_shared, is_there, room_for
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.channel import Channel
    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.base import Readable, Tier
    from trainckpt.tiers.ladder import Ladder
    from trainckpt.tiers.memory import MemoryPlace

FETCHED_WITHIN_S = 120.0
FETCHED_FROM_BYTES = 8 << 20  # what is smaller is read sooner than it is shared
FROM_A_STORE_BYTES = 1 << 20  # the same, where a request takes tens of milliseconds
MAX_RANKS = 256  # that pass files on: each finds all others
EXCHANGE_S = 60.0


class Passing(NamedTuple):
    """One file, on its way between hosts.

    Attributes:
        number: Of the file.
        reader: The rank that has it in its host's memory, or brings it there.
        takers: One rank of each host that lacks it.
    """

    number: int
    reader: int
    takers: tuple[int, ...]


def plan_passing(
    num_files: int, hosts: Sequence[str], held: Mapping[str, Sequence[int]]
) -> list[Passing]:
    """Who reads each file, and who takes it: pure. Files that every host holds are left out.

    Args:
        num_files: Of the snapshot.
        hosts: Of each rank.
        held: Host -> numbers of the files in its memory.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    names = list(ranks_of)
    found = []
    for number in range(num_files):
        lacking = [host for host in names if number not in held.get(host, ())]
        if not lacking:
            continue
        having = [host for host in names if host not in lacking]
        home = having[number % len(having)] if having else names[number % len(names)]
        turn = number // len(names)
        of = {host: ranks[turn % len(ranks)] for host, ranks in ranks_of.items()}
        takers = tuple(of[host] for host in lacking if host != home)
        found.append(Passing(number, of[home], takers))
    return found


def fetch_together(
    source: Readable,
    ladder: Ladder,
    place: MemoryPlace | None,
    channel: Channel,
    hosts: Sequence[str],
    name: SnapshotName,
    load: Callable[[], Manifest],
    warm: Callable[[Manifest], None] = lambda _: None,
    *,
    by_shares: bool = False,
) -> None:
    """Bring what all ranks need into the memory of all hosts. Every rank calls it.

    Every rank waits for all, whatever its own host has: another may have memory, or more ranks.

    Args:
        source: From where; what is encrypted is decrypted there.
        ladder: Beneath it.
        place: This host's memory, if it has any of this run.
        channel: Fresh keys.
        hosts: Of each rank.
        name: Of the snapshot.
        load: Reads the snapshot's manifest; told of its errors is who reads it afterwards.
        warm: Called before anything is read, if all of it is brought to this host's memory now:
            what is there already is copied at once, and pages are made with it.
        by_shares: The ranks of this host read a directory between them: what is there need not
            come to their host's memory.
    """
    me = channel.world.rank
    local = [rank for rank, host in enumerate(hosts) if host == hosts[me]]
    came = place is None or place.wait_fetched(FETCHED_WITHIN_S)
    if not came and me == local[0]:
        logger.warning(
            "another process has been reading into this host's memory for %.0f s: %s is read "
            "without waiting for it any longer", FETCHED_WITHIN_S, name,
        )  # fmt: skip
    manifest = None
    if place is not None and len(hosts) > 1:
        with contextlib.suppress(TrainckptError, OSError):  # it will be told when it is read
            manifest = _worth_it(ladder, place, load(), len(local) / len(hosts))
    by_shares = by_shares and manifest is not None and is_directory(ladder, manifest)
    if manifest is not None and not by_shares and not _is_all_there(place, manifest):
        warm(manifest)
    if len(local) < len(hosts) and _between_hosts(source, ladder, place, channel, hosts, manifest):
        return
    if place is not None and manifest is not None and len(local) > 1 and not by_shares:
        share = range(local.index(me), len(manifest.files), len(local))
        fetch(source, place, manifest, share)
    channel.gather("fetched", True, RANKS_TIMEOUT_S)


def _worth_it(
    ladder: Ladder, place: MemoryPlace, manifest: Manifest, share: float
) -> Manifest | None:
    """`share`: of all ranks, those of this host."""
    total = sum(file.num_bytes for file in manifest.files)
    least = FETCHED_FROM_BYTES if is_directory(ladder, manifest) else FROM_A_STORE_BYTES
    if total < least or not is_shared(manifest):
        return None
    training = training_bytes(int(held_bytes(manifest) * share))
    return manifest if has_room(place, total, training) else None


def _is_all_there(place: MemoryPlace | None, manifest: Manifest) -> bool:
    numbers = range(len(manifest.files))
    return place is not None and all(is_there(place, manifest, number) for number in numbers)


def is_directory(ladder: Ladder, manifest: Manifest) -> bool:
    """Whether the first of its files is read from one."""
    key = f"{manifest.name.folder}/{manifest.files[0].name}"
    tier: Tier = ladder.tiers[ladder.number_of(key)]
    return isinstance(tier, LocalTier)


def _between_hosts(
    source: Readable,
    ladder: Ladder,
    place: MemoryPlace | None,
    channel: Channel,
    hosts: Sequence[str],
    manifest: Manifest | None,
) -> bool:
    """Whether the files are passed on between the hosts; else each host reads all by itself."""
    me = channel.world.rank
    mine: dict[str, Any] = {"can": False, "held": []}
    with contextlib.suppress(TrainckptError, OSError):
        if place is not None and manifest is not None and exchange.is_there():
            numbers = range(len(manifest.files))
            mine["held"] = [n for n in numbers if is_there(place, manifest, n)]
            mine["can"] = not is_directory(ladder, manifest)
    told = channel.gather("held", mine, RANKS_TIMEOUT_S)
    if len(hosts) > MAX_RANKS or not all(each["can"] for each in told):
        return False
    assert place is not None
    assert manifest is not None
    held: dict[str, list[int]] = {}
    for host, each in zip(hosts, told, strict=True):
        held.setdefault(host, each["held"])
    plan = plan_passing(len(manifest.files), hosts, held)
    with contextlib.ExitStack() as stack:
        has, room = _make_ready(source, place, manifest, plan, me, stack)
        everyone = channel.gather("fetched", {"has": has, "room": sorted(room)}, RANKS_TIMEOUT_S)
        passing = [
            (p.number, p.reader, taker)
            for p in plan if p.number in everyone[p.reader]["has"]
            for taker in p.takers if p.number in everyone[taker]["room"]
        ]  # fmt: skip
        _pass_on(place, manifest, channel, passing, room, stack)
    channel.gather("passed", True, RANKS_TIMEOUT_S)
    return True


def _make_ready(
    source: Readable,
    place: MemoryPlace,
    manifest: Manifest,
    plan: Sequence[Passing],
    me: int,
    stack: contextlib.ExitStack,
) -> tuple[list[int], dict[int, Arena]]:
    """Bring what this rank reads, and make room for what it takes; numbers of those files."""
    room: dict[int, Arena] = {}
    for each in plan:
        if me in each.takers and (arena := room_for(place, manifest, each.number)) is not None:
            room[each.number] = arena
            stack.callback(arena.close)
    own = [each.number for each in plan if each.reader == me]
    with contextlib.suppress(TrainckptError, OSError):
        fetch(source, place, manifest, own)
    return [n for n in own if is_there(place, manifest, n)], room


def _pass_on(
    place: MemoryPlace,
    manifest: Manifest,
    channel: Channel,
    passing: Sequence[tuple[int, int, int]],
    room: Mapping[int, Arena],
    stack: contextlib.ExitStack,
) -> None:
    """Send and receive; what could not be passed on is read from the tier by whoever lacks it."""
    me = channel.world.rank
    members = sorted({rank for _, reader, taker in passing for rank in (reader, taker)})
    if me not in members:
        return
    try:
        group = exchange.Exchange(channel, "hosts", members, EXCHANGE_S)
        stack.callback(group.close)
        receives = [(members.index(reader), number, room[number].memory)
                    for number, reader, taker in passing if taker == me]  # fmt: skip
        sends = [
            (members.index(taker), number, data)
            for number, reader, taker in passing if reader == me
            for data in [_held(place, manifest, number, stack)]
        ]  # fmt: skip
        group.settle(group.begin(receives, sends))
        for _, number, _ in receives:
            room[number].publish(manifest.name.folder, manifest.files[number].name)
    except (NoAgreement, OSError) as error:
        logger.warning("files could not be passed on between the hosts, each reads them by itself: "
                       "%s", error)  # fmt: skip


def _held(
    place: MemoryPlace, manifest: Manifest, number: int, stack: contextlib.ExitStack
) -> memoryview:
    """A file in this host's memory; `OSError` if it is gone."""
    file = manifest.files[number]
    held = place.held(manifest.name.folder, file.name, file.content.num_bytes)
    if held is None:
        raise OSError(f"{file.name} is not in memory any more")
    stack.callback(held.close)
    return held.data
