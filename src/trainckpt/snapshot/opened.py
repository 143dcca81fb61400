"""Opened: an encrypted snapshot, read as if it were none, by whoever has a key.

    admit     unwraps the snapshot's key and those of the older ones it refers to; the manifest is
              proven, and says from then on what the files were before
    reading   chunks come as they are stored, straight to where they belong, and are decrypted and
              authenticated there; of those that are wanted in part, a copy. Nothing is handed on
              that was not authenticated

Whatever is not encrypted passes through. Without a key nothing is asked of the cipher.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.encryption import envelope, sealed_manifest
from trainckpt.encryption.keys import read_identities
from trainckpt.encryption.sealed_file import FOOTER_BYTES, TAG_BYTES, Place, Unsealer
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.names import SNAPSHOTS
from trainckpt.tiers.direct import copy, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.encryption.keys import Identity
    from trainckpt.encryption.sealed_file import Chunk
    from trainckpt.format.files import FileEntry
    from trainckpt.format.manifest import Manifest
    from trainckpt.tiers.base import Readable

RUN_BYTES = 8 << 20  # of chunks that one thread reads and decrypts
KEPT_CHUNKS = 4  # decrypted, of which a part was wanted: most often the next one lies there too
TAIL_BYTES = 64 << 10  # read at first: most often it is enough


class Opener:
    """Whoever reads with some identities, or none. Their file is read when it is first needed."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._identities: tuple[Identity, ...] = ()

    @property
    def identities(self) -> tuple[Identity, ...]:
        """What was given; errors as `keys.read_identities`."""
        if not self._identities and self._path is not None:
            self._identities = read_identities(self._path)
        return self._identities

    def key(self, manifest: Manifest, snapshot: str) -> bytes:
        """Of a snapshot, as its manifest has it or one that refers to it.

        Raises:
            ConfigurationError: no identity, or one that it is not encrypted to.
            UnusableSnapshot: what was wrapped was changed.
        """
        assert manifest.encryption is not None
        wrapped = manifest.encryption.keys[snapshot]
        return envelope.unwrap_any(wrapped, self.identities, manifest.run, snapshot)


class Opened:
    """Reads of snapshots in one tier; as `base.Readable`."""

    def __init__(self, tier: Readable, opener: Opener) -> None:
        self.name, self.url = tier.name, tier.url
        self.list, self.read = tier.list, tier.read
        self._tier, self._opener = tier, opener
        self._sealed: dict[str, tuple[FileEntry, bytes, Place]] = {}
        self._files: dict[str, _File] = {}
        self._opening = threading.Lock()

    def admit(self, manifest: Manifest) -> Manifest:
        """Let a snapshot's files be read; what is known of it then. Not encrypted: as it is.

        Raises:
            ConfigurationError: no identity, or one that it is not encrypted to.
            UnusableSnapshot: manifest or keys were changed.
        """
        if manifest.encryption is None:
            return manifest
        keys = {name: self._opener.key(manifest, name) for name in manifest.encryption.keys}
        opened = sealed_manifest.open_sealed(manifest, keys[str(manifest.name)])
        own = [(f"{manifest.name}/{file.name}", file) for file in opened.files]
        for path, file in (*own, *((file.name, file) for file in opened.reached)):
            folder, _, name = path.partition("/")
            place = Place(manifest.run, folder, name)
            self._sealed[f"{SNAPSHOTS}/{path}"] = file, keys[folder], place
        return opened

    def size(self, key: str) -> int | None:
        """Of the file as it was before."""
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
    """Chunks that lie side by side, read and decrypted in one go.

    Attributes:
        chunks: In the order in which they are stored.
        into: Memory for all of them.
        parts: Which parts wait for it.
        copies: What is then copied: to where, and from which byte of `into` on.
    """

    chunks: list[Chunk]
    into: memoryview
    parts: list[int]
    copies: list[tuple[memoryview, int]]


class _File:
    """One sealed file."""

    def __init__(
        self, tier: Readable, key: str, entry: FileEntry, secret: bytes, place: Place
    ) -> None:
        self._tier, self._key = tier, key
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._keeping = threading.Lock()
        tail = bytearray(min(TAIL_BYTES, entry.num_bytes))
        tier.read_into(key, entry.num_bytes - len(tail), memoryview(tail))
        footer = bytes(tail[-FOOTER_BYTES:])
        self._unsealer = Unsealer(secret, place, footer, entry.num_bytes)
        layout = self._unsealer.layout
        if layout.plain_bytes != entry.content.num_bytes:
            raise UnusableSnapshot(f"{key} is not the file that its manifest names")
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
            if not waits:  # all of it was kept, or it has no bytes
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
        """Some of a chunk is wanted: from what is kept, or once it was read."""
        low = max(first_byte, chunk.first_byte)
        high = min(first_byte + len(into), chunk.first_byte + chunk.num_bytes)
        target = into[low - first_byte : high - first_byte]
        at = low - chunk.first_byte
        with self._keeping:
            kept = self._kept.get(chunk.number)
        if kept is not None:
            copy(target, kept[at : at + len(target)])
            return
        if chunk.number not in runs:
            scratch = memory(chunk.num_bytes, chunk.stored_at)
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
            copy(target, run.into[first : first + len(target)])
        if run.copies:
            with self._keeping:
                self._kept[run.chunks[0].number] = run.into
                while len(self._kept) > KEPT_CHUNKS:
                    self._kept.popitem(last=False)


def check_all(tier: Readable, key: str, num_bytes: int) -> None:
    """Decrypt a whole file, so that every chunk of it is authenticated.

    Args:
        tier: An `Opened` one.
        key, num_bytes: Of the file as it was before.
    """
    scratch = memory(min(RUN_BYTES, num_bytes))
    for at in range(0, num_bytes, RUN_BYTES):
        tier.read_into(key, at, scratch[: min(RUN_BYTES, num_bytes - at)])
