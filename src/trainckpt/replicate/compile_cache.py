"""Copy a command's compile caches through the tiers: the option `compile_cache="tiers"`.

    fetch    at a start, before anything is compiled: the first rank of each host that has none
    upload   rank 0, on a thread of its own: once training has made steps and compiled nothing for
             a while, and again after each later compilation

    compile-cache/<sha256>.tar.gz   the archive
    compile-cache/<toolchain>.json  the digest of the newest archive for one toolchain, sealed

The file of a toolchain is replaced once its archive is whole. The digest finds damage, and an
archive that was exchanged alone; it is no signature. Whoever may write to the tier may run code on
the hosts of the run: hence an option. No snapshot waits for an upload, and no stop does.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import THROUGH_TIERS
from trainckpt.errors import ConfigurationError, TrainckptError, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.storage.compile_folder import SHARED, folder_in_use
from trainckpt.storage.folder_archive import MAX_BYTES, Packed, list_files, pack, unpack
from trainckpt.storage.worker_pool import answer_within

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
ENTRY_BYTES = 4096
NICE = 10
_BLOCK = 8 << 20
_ENTRY = re.compile(r"([0-9a-f]{32})\.json")
NOT_OWN = (
    'compile_cache="tiers": nothing is copied, since these processes have no folder of their own '
    "for compile caches; launch with `trainckpt run --compile-cache tiers`, and without "
    "TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR"
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
    options: Options, channel: RankStore, hosts: Sequence[str], tiers: Sequence[Tier]
) -> Path | None:
    """Fetch this command's caches where a host has none. Every rank calls it.

    Args:
        options: Options of the run, the same on all ranks.
        channel: Store between the ranks.
        hosts: Host of each rank.
        tiers: The tier that holds the copies, and others that may.

    Returns:
        The folder to upload, on rank 0; None: nothing is uploaded.
    """
    if options.compile_cache != THROUGH_TIERS:
        return None
    rank = channel.world.rank
    folder = folder_in_use(os.environ)
    if folder is None or folder.name == SHARED:
        folder = None
        if rank == 0:
            logger.warning("%s", NOT_OWN)
    elif rank == hosts.index(channel.world.host):
        fetch(tiers, folder)
    channel.gather("compile cache", True, RANKS_TIMEOUT_S)
    return folder if rank == 0 else None


def fetch(tiers: Sequence[Tier], folder: Path) -> bool:
    """Fetch the caches from the first tier with good ones, if the folder is empty.

    Returns:
        True if the caches were fetched. What is wrong with a tier is logged: the run begins cold.
    """
    if list_files(folder):
        return False
    for tier in tiers:
        begun_s = time.monotonic()
        try:
            entry = answer_within(tier.url, partial(read_entry, tier, folder.parent.name))
            if entry is None:
                continue
            _fetch(tier, entry, folder)
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


def _fetch(tier: Tier, entry: CacheEntry, folder: Path) -> None:
    if tier.size(entry.key) != entry.num_bytes or entry.num_bytes > MAX_BYTES:
        raise UnusableSnapshot(f"{entry.key} is missing, or not of {entry.num_bytes} bytes")
    with _temporary_file(folder.parent) as archive:
        archive.touch(mode=0o600, exist_ok=False)
        with archive.open("wb") as file:
            for first_byte in range(0, entry.num_bytes, _BLOCK):
                block = memoryview(bytearray(min(_BLOCK, entry.num_bytes - first_byte)))
                tier.read_into(entry.key, first_byte, block)
                file.write(block)
        try:
            unpack(archive, Packed(entry.sha256, entry.num_bytes), folder)
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
    with _temporary_file(folder.parent) as archive:
        packed = pack(folder, listing, archive)
        entry = CacheEntry(packed.sha256, packed.num_bytes, time.time())
        size = tier.size(entry.key)
        if size != entry.num_bytes:
            blocks = _blocks(archive)
            tier.write(entry.key, blocks, entry.num_bytes, replacing=size is not None)
    tier.replace(f"{KEYS}/{toolchain}.json", json_io.with_digest(asdict(entry)))
    prune(tier)
    return entry


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


@contextlib.contextmanager
def _temporary_file(folder: Path) -> Iterator[Path]:
    """Yield a free path in a folder of this host; the file is removed at the end."""
    path = folder / f".tmp-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _blocks(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield memoryview(block)
