"""Copies of process dumps in the slower tiers of a run, for the loss of its place's disk.

    send    the images, this host's word for the record, and last the record: before that nothing
            of it is listed. The very bytes that lie in the run's place, so verify, prune and the
            copy itself need no key
    bring   back to the run's place, in the same order: only what this host has given its word for,
            each image verified

Images hold every secret of their processes. What is not encrypted stays on this host: it is sent
to directories on its disks, and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, SaveFailed, TrainckptError, UnusableSnapshot
from trainckpt.format import digest
from trainckpt.format.dump import MAX_BYTES, DumpName, DumpRecord
from trainckpt.process_dump import host_word, restore
from trainckpt.snapshot import flush
from trainckpt.tiers.capabilities import file_system, is_remote
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.dump import Image
    from trainckpt.tiers.base import Readable, Tier


def why_not_sent(record: DumpRecord, tier: Tier) -> str:
    """Why a tier gets no copy of a dump, or ""."""
    where = tier.url
    if isinstance(tier, LocalTier):
        kind = file_system(tier.root)
        if not is_remote(kind):
            return ""
        where = f"{tier.url} ({kind})"
    if record.keys:
        return ""
    return (
        f"{where} is not on this host, and images hold every secret of the processes; with "
        "encrypt_to they are encrypted, and sent"
    )


def send(
    place: Tier,
    target: Tier,
    run: str,
    name: DumpName,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Copy a dump to a tier that holds the run; how many bytes were written.

    Raises:
        ConfigurationError: it would leave this host in the clear.
        UnusableSnapshot: it is damaged.
        SaveFailed, TierUnavailable: a tier refused.
    """
    data = place.read(name.record, max_bytes=MAX_BYTES)
    record = restore.load(place, run, name)
    if why := why_not_sent(record, target):
        raise ConfigurationError(why)
    if is_there := target.size(name.record) is not None:
        _must_be_the_same(target, name, data)
    num_bytes = 0
    for image in record.images:
        key = name.image(image.name)
        if not is_there or check(target, key, image):
            flush.copy_file([place], target, key, image)
            num_bytes += image.num_bytes
        progress(image.num_bytes)
    target.replace(name.word, host_word.give(data))
    target.create(name.record, data)
    return num_bytes


def bring(
    place: Tier,
    sources: Sequence[Tier],
    run: str,
    name: DumpName,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Make a dump whole in the run's place; how many bytes were written.

    Raises:
        UnusableSnapshot: no source has a good copy of what is missing, or none that is ours.
        TierUnavailable: a tier refused.
    """
    is_there = place.size(name.record) is not None
    if not is_there:
        record, data, sources = ours(sources, run, name)
    else:
        record = restore.load(place, run, name)
    num_bytes = 0
    for image in record.images:
        key = name.image(image.name)
        if why := check(place, key, image):
            if not sources:
                raise UnusableSnapshot(f"{key} in {place.url} {why}, and there is no copy")
            flush.copy_file(sources, place, key, image)
            num_bytes += image.num_bytes
        progress(image.num_bytes)
    if not is_there:
        place.create(name.record, data)
    return num_bytes


def read_ours(tier: Readable, run: str, name: DumpName) -> tuple[DumpRecord, bytes]:
    """The record of a copy, and its bytes, if this host has given its word for it.

    Raises:
        UnusableSnapshot: it is not there, or damaged, or may be anybody's.
    """
    data = tier.read(name.record, max_bytes=MAX_BYTES)  # once: what is proven is what is used
    word = b""
    if tier.size(name.word) is not None:
        word = tier.read(name.word, max_bytes=host_word.MAX_BYTES)
    if not host_word.is_ours(data, word):
        raise UnusableSnapshot(
            f"{name} in {tier.url} is not proven to be from this host and user, by "
            f"{host_word.key_file()}"
        )
    record = DumpRecord.load(data, name.record)
    if (record.run, record.name) != (run, name):
        raise UnusableSnapshot(f"{name.record} in {tier.url} is of another run or dump")
    return record, data


def check(tier: Readable, key: str, image: Image) -> str:
    """Why a copy of an image is not what the record says, or ""."""
    try:
        size = tier.size(key)
        if size is None:
            return "is missing"
        if size != image.num_bytes:
            return f"has {size} bytes, not {image.num_bytes}"
        passed, memory = digest.Running(), memoryview(bytearray(min(size, flush.BLOCK_BYTES)))
        for at in range(0, size, flush.BLOCK_BYTES):
            block = memory[: min(flush.BLOCK_BYTES, size - at)]
            tier.read_into(key, at, block)
            passed.update(block)
    except UnusableSnapshot as error:
        return error.message
    return "" if passed.hexdigest() == image.digest else "does not match its digest"


def why_not_whole(tier: Readable, record: DumpRecord) -> str:
    """Which image is not there with its length, or ""."""
    for image in record.images:
        size = tier.size(record.name.image(image.name))
        if size != image.num_bytes:
            how = "is missing" if size is None else f"has {size} bytes, not {image.num_bytes}"
            return f"the image {image.name} {how}"
    return ""


def _must_be_the_same(target: Tier, name: DumpName, data: bytes) -> None:
    if target.read(name.record, max_bytes=MAX_BYTES) != data:
        raise SaveFailed(f"another dump is called {name} in {target.url}")


def ours(sources: Sequence[Tier], run: str, name: DumpName) -> tuple[DumpRecord, bytes, list[Tier]]:
    """The record, its bytes, and the tiers that hold these; the nearest that is ours counts.

    Raises:
        UnusableSnapshot: none is.
    """
    refused: list[str] = []
    found: list[tuple[DumpRecord, bytes, Tier]] = []
    for tier in sources:
        try:
            if tier.size(name.record) is not None:
                found.append((*read_ours(tier, run, name), tier))
        except TrainckptError as error:
            refused.append(error.message)
    if not found:
        raise UnusableSnapshot("; ".join(refused) or f"no tier holds {name}")
    record, data, _ = found[0]
    return record, data, [tier for _, other, tier in found if other == data]
