"""Programs of real ranks: copies and parities made and used over gloo, all cases in one process."""

from __future__ import annotations

import os
import random
from itertools import combinations

from trainckpt.errors import NoAgreement
from trainckpt.ranks.exchange import Exchange
from trainckpt.ranks.store import connect
from trainckpt.ranks.world import current_world
from trainckpt.snapshot import peer_transfer
from trainckpt.snapshot.peer_transfer import LocalParts, SetState, recover
from trainckpt.snapshot.redundancy import CodedSet

LENGTHS = (70_001, 50_000, 3, 64_000, 0)


def start_attempt():
    """The channel; and blocks so small that few bytes take several rounds."""
    peer_transfer.SET_BLOCK_BYTES = peer_transfer.COPY_BLOCK_BYTES = 16_384
    return connect(current_world(), "test/1")


def file_of(rank):
    return memoryview(bytearray(random.Random(rank).randbytes(LENGTHS[rank])))


def nothing():
    """Goes on."""


def keep_and_recover(rank):
    """Parities of one set, then every loss in turn; how many were made good, by code."""
    channel, found = start_attempt(), {}
    everyone = list(range(len(LENGTHS)))
    group = Exchange(channel, "set", everyone, 30)
    for num_parity in (1, 2, 3):
        coded = CodedSet(tuple(everyone), 4, num_parity)  # the last one only helps
        chunk_bytes = coded.chunk_bytes(max(LENGTHS))
        mine, kept = file_of(rank), memoryview(bytearray(num_parity * chunk_bytes))
        peer_transfer.make_parities(
            coded, rank, sizes=LENGTHS, mine=mine, into=kept, group=group, may_go_on=nothing
        )
        cases = 0
        for lost in combinations(everyone, num_parity):
            check(coded, rank, lost, mine, kept, group)
            cases += 1
        found[num_parity] = cases
    group.close()
    channel.barrier("all leave", 30)
    return found


def check(coded, rank, lost, mine, kept, group):
    """The lost have neither file nor parities; the first of them rebuilds."""
    there = [r for r in range(len(LENGTHS)) if r not in lost]
    files = {r: r for r in there if LENGTHS[r]}
    left = SetState(coded, LENGTHS, files, {r: r for r in there})
    assert left.is_enough
    into = {place: memoryview(bytearray(LENGTHS[place])) for place in left.lost}
    is_there = rank in there
    stock = LocalParts(rank, {rank: mine} if is_there else {}, {rank: kept} if is_there else {})
    into = into if rank == lost[0] else {}
    recover(left, stock, rebuilder=lost[0], group=group, into=into)
    for place, memory in into.items():
        assert memory == file_of(place), (lost, place)


def copy_in_a_ring(rank):
    """Each rank's file to the next one."""
    channel = start_attempt()
    size = channel.world.size
    groups = {
        owner: Exchange(channel, f"copy/{owner}", [owner, (owner + 1) % size], 30)
        for owner in sorted({rank, (rank - 1) % size})
    }
    before = (rank - 1) % size
    into = memoryview(bytearray(LENGTHS[before]))
    peer_transfer.copy_files(file_of(rank), groups[rank], [(groups[before], into)], nothing)
    channel.barrier("all leave", 30)
    return into == file_of(before)


def lose_one(rank, how):
    """The second dies, or hangs, in the middle of it; what the others are told, and how soon."""
    channel = start_attempt()
    group = Exchange(channel, "set", [0, 1, 2], 30)
    group.timeout_s = 1.0
    channel.barrier("connected", 30)
    coded = CodedSet((0, 1, 2), 3, 1)
    rounds = []

    def fail():
        rounds.append(True)
        if rank == 1 and len(rounds) == 2:
            if how == "killed":
                os._exit(9)
            if how == "hangs":
                channel.get("both have given up", 30)
            if how == "wants the network":
                raise NoAgreement("something more urgent")

    sizes, mine = (100_000,) * 3, memoryview(bytearray(100_000))
    try:
        peer_transfer.make_parities(
            coded,
            rank,
            sizes=sizes,
            mine=mine,
            into=memoryview(bytearray(50_000)),
            group=group,
            may_go_on=fail,
        )
    except NoAgreement as error:
        group.close()
        if how == "hangs" and channel.count("given up") == 2:
            channel.put("both have given up", True)
        return str(error).partition(" (")[0]
    return "done"
