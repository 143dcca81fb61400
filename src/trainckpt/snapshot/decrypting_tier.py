"""Read encrypted snapshots as if they were plain, given an identity.

    admit     unwraps the keys of the snapshot and of the older ones it refers to, authenticates
              the manifest, and returns it with the plain lengths and digests
    reading   chunks are read to their final memory, then decrypted and authenticated there;
              a partly wanted chunk goes through scratch. No byte leaves unauthenticated

Unencrypted files pass through. Without a key the cipher is not used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.encryption import encrypted_file, keys
from trainckpt.encryption.encrypted_file import FOOTER_BYTES, TAG_BYTES, ChunkPosition, Decryptor
from trainckpt.encryption.keys import read_identities
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.names import SNAPSHOTS
from trainckpt.storage.direct_io import copy_bytes, private_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.encryption.encrypted_file import Chunk
    from trainckpt.encryption.keys import Identity
    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.storage.base import Readable

RUN_BYTES = 8 << 20  # of chunks that one thread reads and decrypts
KEPT_CHUNKS = 4  # decrypted chunks to cache: the next part often lies in one of them
TAIL_BYTES = 64 << 10  # first read of the tail: usually enough


class KeyRing:
    """Identities for decryption, possibly none. Their file is read at first use."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._identities: tuple[Identity, ...] = ()

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Return the identities; errors as `keys.read_identities`."""
        if not self._identities and self._path is not None:
            self._identities = read_identities(self._path)
        return self._identities

    def key(self, manifest: Manifest, snapshot: str) -> bytes:
        """Return the key of a snapshot named in the manifest: its own, or an older one's.

        Raises:
            ConfigurationError: no identity, or none that is a recipient.
            UnusableSnapshot: the wrapped key was modified.
        """
        assert manifest.encryption is not None
        wrapped = manifest.encryption.keys[snapshot]
        return keys.unwrap_any(wrapped, self.identities, manifest.run, snapshot)


class DecryptingTier:
    """Decrypting reader of snapshots in one tier; a `base.Readable`."""

    def __init__(self, tier: Readable, opener: KeyRing) -> None:
        self.name, self.url = tier.name, tier.url
        self.list, self.read = tier.list, tier.read
        self._tier, self._opener = tier, opener
        self._sealed: dict[str, tuple[FileEntry, bytes, ChunkPosition]] = {}
        self._files: dict[str, _File] = {}
        self._opening = threading.Lock()

    def admit(self, manifest: Manifest) -> Manifest:
        """Allow reads of a snapshot's files; return its manifest with the plain facts.

        An unencrypted manifest is returned as it is.

        Raises:
            ConfigurationError: no identity, or none that is a recipient.
            UnusableSnapshot: the manifest or a key was modified.
        """
        if manifest.encryption is None:
            return manifest
        keys = {name: self._opener.key(manifest, name) for name in manifest.encryption.keys}
        opened = encrypted_file.decrypt_manifest(manifest, keys[str(manifest.name)])
        own = [(f"{manifest.name}/{file.name}", file) for file in opened.files]
        for path, file in (*own, *((file.name, file) for file in opened.reached)):
            folder, _, name = path.partition("/")
            position = ChunkPosition(manifest.run, folder, name)
            self._sealed[f"{SNAPSHOTS}/{path}"] = file, keys[folder], position
        return opened

    def size(self, key: str) -> int | None:
        """Return a file's length: plain if it is admitted and of the right stored length."""
        found = self._tier.size(key)
        entry = self._sealed.get(key)
        is_whole = entry is not None and found == entry[0].num_bytes
        return entry[0].content.num_bytes if entry is not None and is_whole else found

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """See `base.Readable`."""
        self.read_parts(key, [(first_byte, into)], lambda _: None)

    def read_parts(
        self, key: str, parts: Sequence[tuple[int, memoryview]], done: Callable[[int], None]
    ) -> None:
        """See `base.Readable`."""
        if key not in self._sealed:
            self._tier.read_parts(key, parts, done)
            return
        with self._opening:
            if key not in self._files:
                self._files[key] = _File(self._tier, key, *self._sealed[key])
            file = self._files[key]
        file.read_parts(parts, done)


class _Run(NamedTuple):
    """Adjacent chunks, read and decrypted together.

    Attributes:
        chunks: In stored order.
        into: Memory for all of them.
        parts: Numbers of the parts that wait for it.
        copies: Copies to make then: target, and offset in `into`.
    """

    chunks: list[Chunk]
    into: memoryview
    parts: list[int]
    copies: list[tuple[memoryview, int]]


class _File:
    def __init__(
        self, tier: Readable, key: str, entry: FileEntry, secret: bytes, position: ChunkPosition
    ) -> None:
        self._tier, self._key = tier, key
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._keeping = threading.Lock()
        tail = bytearray(min(TAIL_BYTES, entry.num_bytes))
        tier.read_into(key, entry.num_bytes - len(tail), memoryview(tail))
        footer = bytes(tail[-FOOTER_BYTES:])
        self._unsealer = Decryptor(secret, position, footer, entry.num_bytes)
        layout = self._unsealer.layout
        if layout.plain_bytes != entry.content.num_bytes:
            raise UnusableSnapshot(f"{key} differs from the file in its manifest")
        wanted = layout.num_chunks * TAG_BYTES
        if wanted + FOOTER_BYTES > len(tail):
            tail = bytearray(wanted + FOOTER_BYTES)
            tier.read_into(key, entry.num_bytes - len(tail), memoryview(tail))
        first = len(tail) - FOOTER_BYTES - wanted
        self._unsealer.learn(bytes(tail[first : first + wanted]))

    def read_parts(
        self, parts: Sequence[tuple[int, memoryview]], done: Callable[[int], None]
    ) -> None:
        """See `base.Readable`."""
        runs = self._plan(parts)
        left = [0] * len(parts)
        for run in runs:
            for number in run.parts:
                left[number] += 1
        counting = threading.Lock()

        def take(which: int) -> None:
            # on any thread
            run = runs[which]
            self._open(run)
            with counting:
                for number in run.parts:
                    left[number] -= 1
                over = [number for number in run.parts if not left[number]]
            for number in over:
                done(number)

        for number, waits in enumerate(left):
            if not waits:  # copied from the cache, or empty
                done(number)
        if runs:
            stored = [(run.chunks[0].stored_at, run.into) for run in runs]
            self._tier.read_parts(self._key, stored, take)

    def _plan(self, parts: Sequence[tuple[int, memoryview]]) -> list[_Run]:
        layout, runs, partial_runs = self._unsealer.layout, list[_Run](), dict[int, _Run]()
        for number, (first_byte, into) in enumerate(parts):
            if first_byte + len(into) > layout.plain_bytes:
                raise UnusableSnapshot(f"{self._key} ends too early")
            run: list[Chunk] = []
            begin = 0
            for chunk in layout.chunks(first_byte, len(into)):
                at = chunk.first_byte - first_byte
                whole = at >= 0 and at + chunk.num_bytes <= len(into)
                apart = run and chunk.stored_at != run[-1].stored_at + run[-1].num_bytes
                size = sum(each.num_bytes for each in run)
                if run and (not whole or apart or size + chunk.num_bytes > RUN_BYTES):
                    runs.append(_Run(run, into[begin : begin + size], [number], []))
                    run = []
                if whole:
                    begin = begin if run else at
                    run.append(chunk)
                else:
                    self._want_part(chunk, number, first_byte, into, partial_runs)
            if run:
                size = sum(each.num_bytes for each in run)
                runs.append(_Run(run, into[begin : begin + size], [number], []))
        return [*runs, *partial_runs.values()]

    def _want_part(
        self, chunk: Chunk, number: int, first_byte: int, into: memoryview, runs: dict[int, _Run]
    ) -> None:
        """Copy a part of a chunk from the cache, or plan to after its read."""
        low = max(first_byte, chunk.first_byte)
        high = min(first_byte + len(into), chunk.first_byte + chunk.num_bytes)
        target = into[low - first_byte : high - first_byte]
        at = low - chunk.first_byte
        with self._keeping:
            kept = self._kept.get(chunk.number)
        if kept is not None:
            copy_bytes(target, kept[at : at + len(target)])
            return
        if chunk.number not in runs:
            scratch = private_memory(chunk.num_bytes, chunk.stored_at)
            runs[chunk.number] = _Run([chunk], scratch, [], [])
        run = runs[chunk.number]
        if number not in run.parts:
            run.parts.append(number)
        run.copies.append((target, at))

    def _open(self, run: _Run) -> None:
        at = 0
        for chunk in run.chunks:
            self._unsealer.open(chunk.number, run.into[at : at + chunk.num_bytes])
            at += chunk.num_bytes
        for target, first in run.copies:
            copy_bytes(target, run.into[first : first + len(target)])
        if run.copies:
            with self._keeping:
                self._kept[run.chunks[0].number] = run.into
                while len(self._kept) > KEPT_CHUNKS:
                    self._kept.popitem(last=False)


def check_all(tier: Readable, key: str, num_bytes: int) -> None:
    """Decrypt a whole file, so every chunk is authenticated.

    Args:
        tier: A `DecryptingTier`.
        key, num_bytes: The file, and its plain length.
    """
    scratch = private_memory(min(RUN_BYTES, num_bytes))
    for at in range(0, num_bytes, RUN_BYTES):
        tier.read_into(key, at, scratch[: min(RUN_BYTES, num_bytes - at)])
