"""Copy a command's compile caches through the tiers: the option `compile_cache="tiers"`.

    fetch    at a start, before anything is compiled: the first rank of each host that has none.
             On a thread; after `FETCH_WITHIN_S` the start goes on without the caches
    upload   rank 0, on a thread of its own: once training has made steps and compiled nothing for
             a while, and again after each later compilation

    compile-cache/<sha256>.tar.gz   the archive
    compile-cache/<toolchain>.json  the digest of the newest archive for one toolchain, sealed

The file of a toolchain is replaced once its archive is whole, so an archive that it does not name
may be cut, and is written again. The digest finds damage, and an archive that was exchanged alone;
it is no signature. Every writer of the tier may run code on the hosts of the run: hence an option.
No snapshot waits for an upload, and no stop does.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, BinaryIO

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import THROUGH_TIERS
from trainckpt.errors import ConfigurationError, TrainckptError, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.storage.compile_folder import SHARED, folder_in_use
from trainckpt.storage.folder_archive import MAX_BYTES, Packed, list_files, pack, unpack
from trainckpt.storage.worker_pool import answer_within, aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trainckpt.attempt.options import Options
    from trainckpt.ranks.store import RankStore
    from trainckpt.storage.base import Tier
    from trainckpt.storage.folder_archive import Listing

KEYS = "compile-cache"
MOST_TOOLCHAINS = 4  # kept in a tier, the newest
LOOK_S, LOOK_AGAIN_S = 10.0, 60.0  # while the folder changes, and after a copy
FIRST_STEPS = 2  # of an attempt, before its caches are worth a copy
FETCH_WITHIN_S = 120.0  # of all tiers together; the other ranks wait for RANKS_TIMEOUT_S
ENTRY_BYTES = 4096
NICE = 10
_BLOCK = 8 << 20
_ENTRY = re.compile(r"([0-9a-f]{32})\.json")
NOT_OWN = (
    'compile_cache="tiers": nothing is copied, since these processes have no folder of their own '
    "for compile caches; launch with `trainckpt run --compile-cache tiers`, and without "
    "TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR"
)
NOT_ALIKE = (
    'compile_cache="%s" on rank 0, "%s" on rank %d: nothing is copied; pass the same '
    "compile_cache= (or TRAINCKPT_COMPILE_CACHE) on every rank"
)


def _is_sha256(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


@dataclass(frozen=True)
class CacheEntry:
    """The newest archive for one toolchain, as its file in a tier."""

    sha256: Annotated[str, _is_sha256]
    num_bytes: int
    stored: float  # seconds since 1970

    @property
    def key(self) -> str:
        """Key of the archive."""
        return f"{KEYS}/{self.sha256}.tar.gz"


def check(options: Options) -> None:
    """Refuse copies of compile caches in an encrypted run: they would be readable.

    Raises:
        ConfigurationError: they are asked for.
    """
    if options.compile_cache == THROUGH_TIERS and options.encrypt_to:
        raise ConfigurationError(
            'compile_cache="tiers" would copy the compiled code of this encrypted run unencrypted',
            hint='leave out compile_cache: restarts on the same host are warm with "host" as well',
        )


def set_up(
    reaches: Sequence[str], channel: RankStore, hosts: Sequence[str], tiers: Sequence[Tier]
) -> Path | None:
    """Fetch this command's caches where a host has none. Every rank calls it.

    Args:
        reaches: The option `compile_cache` of each rank.
        channel: Store between the ranks.
        hosts: Host of each rank.
        tiers: The tier that holds the copies, and others that may.

    Returns:
        The folder to upload, on rank 0; None: nothing is uploaded.
    """
    rank = channel.world.rank
    if set(reaches) != {THROUGH_TIERS}:
        if rank == 0 and THROUGH_TIERS in reaches:
            other = next(number for number, reach in enumerate(reaches) if reach != reaches[0])
            logger.warning(NOT_ALIKE, reaches[0], reaches[other], other)
        return None
    folder = folder_in_use(os.environ)
    if folder is None or folder.name == SHARED:
        folder = None
        if rank == 0:
            logger.warning("%s", NOT_OWN)
    elif rank == hosts.index(channel.world.host):
        fetch(tiers, folder)
    channel.gather("compile cache", True, RANKS_TIMEOUT_S)
    return folder if rank == 0 else None


def fetch(tiers: Sequence[Tier], folder: Path, within_s: float = FETCH_WITHIN_S) -> bool:
    """Fetch the caches from the first tier with good ones, if the folder is empty.

    Args:
        tiers: In the order in which they are asked.
        folder: The folder.
        within_s: Seconds for all of them. Later, nothing is put in place.

    Returns:
        True if the caches were fetched. What is wrong with a tier is logged: the run begins cold.
    """
    placing = _Placing()
    ended = aside(partial(_fetch_from_first, tiers, folder, placing))
    if (result := ended(within_s)) is not None:
        return result()
    placing.end()
    logger.warning(
        "compile cache: no copy was fetched within %g s, and the start goes on without", within_s
    )
    return False


class _Placing:
    """Puts fetched caches in place, until `end` is called. For any thread."""

    def __init__(self) -> None:
        self._lock, self._has_ended = threading.Lock(), False

    def end(self) -> None:
        """Let nothing be put in place from now on."""
        with self._lock:
            self._has_ended = True

    def check(self) -> None:
        """Raise `UnusableSnapshot` after the end."""
        if self._has_ended:
            raise UnusableSnapshot("it came after the start had gone on")

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lock)
            self.check()
            stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _fetch_from_first(tiers: Sequence[Tier], folder: Path, placing: _Placing) -> bool:
    if list_files(folder):
        return False
    for tier in tiers:
        begun_s = time.monotonic()
        try:
            entry = answer_within(tier.url, partial(read_entry, tier, folder.parent.name))
            if entry is None:
                continue
            _fetch(tier, entry, folder, placing)
        except (TrainckptError, OSError) as error:
            reason = getattr(error, "message", None) or str(error)
            logger.warning("compile cache: the copy in %s is not used: %s", tier.url, reason)
            continue
        took_s = time.monotonic() - begun_s
        megabytes = entry.num_bytes / 1e6
        logger.info(
            "compile cache: fetched %.1f MB from %s in %.1f s", megabytes, tier.name, took_s
        )
        return True
    return False


def read_entry(tier: Tier, toolchain: str) -> CacheEntry | None:
    """Return the newest archive in the tier for a toolchain; None without one.

    Raises:
        UnusableSnapshot: its file is damaged.
        TierUnavailable: the tier refused.
    """
    key = f"{KEYS}/{toolchain}.json"
    if tier.size(key) is None:
        return None
    data = tier.read(key, max_bytes=ENTRY_BYTES)
    body = json_io.parse(data, key, max_bytes=ENTRY_BYTES)
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{key} is no JSON object")
    entry: CacheEntry = json_io.build(CacheEntry, json_io.verify_digest(body, key, data), key)
    return entry


def _fetch(tier: Tier, entry: CacheEntry, folder: Path, placing: _Placing) -> None:
    if tier.size(entry.key) != entry.num_bytes or entry.num_bytes > MAX_BYTES:
        raise UnusableSnapshot(f"{entry.key} is missing, or not of {entry.num_bytes} bytes")
    with _nameless_file(folder.parent) as archive:
        for first_byte in range(0, entry.num_bytes, _BLOCK):
            placing.check()
            block = memoryview(bytearray(min(_BLOCK, entry.num_bytes - first_byte)))
            tier.read_into(entry.key, first_byte, block)
            archive.write(block)
        try:
            unpack(archive, Packed(entry.sha256, entry.num_bytes), folder, placing)
        except UnusableSnapshot as error:
            raise UnusableSnapshot(f"{entry.key}: {error.message}") from error


class CompileCacheUpload:
    """Uploads the caches of a folder beside training, on rank 0.

    Args:
        tier: Tier for the copies.
        folder: The folder.
        num_steps: Returns the steps of this attempt.
        is_over: Returns True once the attempt has ended.
    """

    def __init__(
        self,
        tier: Tier,
        folder: Path,
        *,
        num_steps: Callable[[], int],
        is_over: Callable[[], bool],
    ) -> None:
        self._tier, self._folder = tier, folder
        self._num_steps, self._is_over = num_steps, is_over

    def start(self) -> None:
        """Start the thread; it ends after the attempt, and nothing waits for it."""
        threading.Thread(target=self._run, name="trainckpt-compile-cache", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        pause = threading.Event()
        seen: Listing = {}
        uploaded: Listing | None = None
        while not self._is_over():
            listing = list_files(self._folder)
            is_quiet = bool(listing) and listing == seen and self._num_steps() >= FIRST_STEPS
            seen = listing
            if is_quiet and listing != uploaded:
                uploaded = listing  # a failure is not repeated until the caches change
                self._upload(listing)
            pause.wait(LOOK_S if listing != uploaded else LOOK_AGAIN_S)

    def _upload(self, listing: Listing) -> None:
        begun_s = time.monotonic()
        try:
            entry = upload(self._tier, self._folder, listing)
        except (TrainckptError, OSError) as error:
            reason = getattr(error, "message", None) or str(error)
            logger.warning("compile cache: not copied to %s: %s", self._tier.url, reason)
            return
        took_s = time.monotonic() - begun_s
        megabytes, name = entry.num_bytes / 1e6, self._tier.name
        logger.info("compile cache: copied %.1f MB to %s in %.1f s", megabytes, name, took_s)


def upload(tier: Tier, folder: Path, listing: Listing) -> CacheEntry:
    """Copy the listed files to the tier, and then let go of older archives.

    Raises:
        UnusableSnapshot: the folder is too large, or changes.
        TrainckptError, OSError: the tier or the disk refused.
    """
    toolchain = folder.parent.name
    with _nameless_file(folder.parent) as archive:
        packed = pack(folder, listing, archive)
        entry = CacheEntry(packed.sha256, packed.num_bytes, time.time())
        if not _has_whole(tier, entry, toolchain):
            tier.clear_unfinished(KEYS)
            tier.write(entry.key, _blocks(archive), entry.num_bytes, replacing=True)
    tier.replace(f"{KEYS}/{toolchain}.json", json_io.with_digest(asdict(entry)))
    prune(tier)
    return entry


def _has_whole(tier: Tier, entry: CacheEntry, toolchain: str) -> bool:
    """Return True if the toolchain's file names this archive, so it was written to its end."""
    with contextlib.suppress(UnusableSnapshot):  # a damaged file is replaced
        stored = read_entry(tier, toolchain)
        if stored is not None and stored.sha256 == entry.sha256:
            return tier.size(entry.key) == entry.num_bytes
    return False


def prune(tier: Tier) -> None:
    """Remove all but the newest archives, one for each of `MOST_TOOLCHAINS`."""
    names = tier.list(KEYS)
    entries: dict[str, CacheEntry] = {}
    for match in filter(None, map(_ENTRY.fullmatch, names)):
        with contextlib.suppress(UnusableSnapshot):
            entry = read_entry(tier, match[1])
            if entry is not None:
                entries[match[0]] = entry
    newest = sorted(entries, key=lambda name: entries[name].stored, reverse=True)[:MOST_TOOLCHAINS]
    wanted = {f"{KEYS}/{name}" for name in newest} | {entries[name].key for name in newest}
    for key in (f"{KEYS}/{name}" for name in names):
        if key not in wanted:
            tier.remove(key)


def _nameless_file(folder: Path) -> BinaryIO:
    """Return an open private file on the folder's disk; it is gone once closed, or by a kill."""
    return tempfile.TemporaryFile(dir=folder)


def _blocks(archive: BinaryIO) -> Iterator[memoryview]:
    archive.seek(0)
    while block := archive.read(_BLOCK):
        yield memoryview(block)
