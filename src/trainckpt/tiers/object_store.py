"""The object-store tier: keys of a run as objects in a bucket, laid out as files are elsewhere.

    write        one request for what is small; else parts, several at once, and the act that makes
                 them one object comes last. What fails is aborted, and is no object
    replace      one request: readers see the old bytes or the new ones
    create       a request that the store refuses if the name is there. Whether it does is tried
                 once; where it does not, names are claimed: see `exclusive`
    read_parts   ranged requests, several at once, of just the bytes that are wanted

An answered write is durable. There are no folders: a prefix with nothing under it is gone. Every
request is made within a time, and again where that may help (`calls`).
"""

from __future__ import annotations

import secrets
import threading
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.tiers import exclusive, uploads
from trainckpt.tiers.calls import Calls, Limits
from trainckpt.tiers.own_random import give_own_randomness
from trainckpt.tiers.redacted import redacted
from trainckpt.tiers.refusals import BEYOND, TAKEN, meaning
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager

    from trainckpt.tiers.breaker import Health
    from trainckpt.tiers.object_client import Entry, ObjectClient

    Result = TypeVar("Result")

TEMPORARY = ".tmp-"
PROBE = "probe"
READ_BYTES = 16 << 20  # of one request
NUM_READERS = 8
STALE_UPLOAD_S = 24 * 3600.0


def open_object_store(url: str, limits: Limits | None = None) -> ObjectStoreTier:
    """The tier at `url`, such as `s3://bucket/run`. Nothing is asked of it yet.

    Raises:
        ConfigurationError: no such kind of store, or its package is not installed.
    """
    from trainckpt.tiers.clients import open_client  # imports fsspec, for a store alone

    name, client, root = open_client(url)
    give_own_randomness()
    shown = redacted(url)
    calls = Calls(shown, limits)
    calls.login = client.login
    return ObjectStoreTier(name, shown.rstrip("/"), client, root, calls)


class ObjectStoreTier:
    """Named bytes in one store. See `base.Tier` for the contract.

    Attributes:
        url: As it may be shown.
    """

    def __init__(self, name: str, url: str, client: ObjectClient, root: str, calls: Calls) -> None:
        self.name, self.url = name, url
        self._client, self._root, self._calls = client, root, calls
        self._probing = threading.Lock()
        self._creates_only: bool | None = None
        self._has_bucket = False
        self._left: set[str] = set()  # where parts may lie of uploads that could not be aborted

    def at(self, folder: str) -> ObjectStoreTier:
        """The tier of a folder in this one, over the same connections."""
        path = self._path(folder)
        return ObjectStoreTier(self.name, f"{self.url}/{folder}", self._client, path, self._calls)

    # ---- write

    def write(
        self,
        key: str,
        blocks: Iterable[memoryview],
        num_bytes: int | None = None,
        held: int = 1,
        *,
        replacing: bool = False,
    ) -> None:
        """Create `key` with the bytes of `blocks`; durable when it returns."""
        del held  # what comes is copied
        path = self._path(key) if replacing else self._new(key)
        size = 2 * self._calls.limits.part_bytes
        if num_bytes is not None:  # else how many there will be is not known
            size = uploads.part_bytes(num_bytes, size)
        parts = uploads.gathered(blocks, size)
        first = next(parts, b"")
        if len(first) < size:
            self._put(key, path, first)
            return
        with self._uploading(key, path, size) as (put, _):
            for number, data in enumerate(chain([first], parts), 1):
                put(number, partial(bytes, data))

    def write_parts(
        self, key: str, num_bytes: int, parts: Iterable[tuple[int, memoryview]]
    ) -> None:
        """Create `key` with parts at their places, sent as they come; durable when it returns."""
        path = self._new(key)
        size = uploads.part_bytes(num_bytes, self._calls.limits.part_bytes)
        if num_bytes <= size:
            pieces = uploads.Pieces(num_bytes, max(num_bytes, 1), in_order=False)
            for first_byte, part in parts:
                pieces.add(first_byte, part)
            pieces.must_be_whole()
            self._put(key, path, pieces.take(1) if num_bytes else b"")
            return
        with self._uploading(key, path, size) as (put, in_order):
            pieces = uploads.Pieces(num_bytes, size, in_order=in_order)
            for first_byte, part in parts:
                for number in pieces.add(first_byte, part):
                    put(number, partial(pieces.take, number))
            pieces.must_be_whole()

    def replace(self, key: str, data: bytes) -> None:
        """Atomically make `data` the bytes of `key`."""
        self._put(key, self._path(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Create `key` with `data`; False, and nothing changed, if it exists."""
        path = self._path(key)
        if not self.creates_only():
            return exclusive.create(self, key, data)

        def ask(tried: int) -> bool:
            try:
                self._client.put(path, data, create_only=True)
            except Exception as error:
                if meaning(error) != TAKEN:
                    raise
                # An earlier try may have done it, though its answer was lost.
                is_ours = bool(tried) and self._client.size(path) == len(data)
                return is_ours and self._client.whole(path, len(data)) == data
            return True

        return self._ask(f"create {key}", ask)

    def creates_only(self) -> bool:
        """Whether the store refuses to create what is there. Tried once."""
        with self._probing:
            if self._creates_only is None:
                self._creates_only = self._client.may_create_only and self._probe()
        return self._creates_only

    # ---- read

    def size(self, key: str) -> int | None:
        """Bytes of `key`, or None if it does not exist."""
        path = self._path(key)
        found = self._ask(f"look at {key}", lambda _: self._client.size(path))
        if found is None and not self._has_bucket:  # or it is because there is no bucket
            self._ask(f"look at {key}", lambda _: self._client.must_have_bucket(path))
        self._has_bucket = True
        return found

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """All bytes of `key`, which must not be more than `max_bytes`."""
        path = self._path(key)
        return self._ask(f"read {key}", lambda _: self._client.whole(path, max_bytes))

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """Fill `into` from `first_byte` on; raises if the object ends before."""
        self.read_parts(key, [(first_byte, into)])

    def read_parts(
        self,
        key: str,
        parts: Sequence[tuple[int, memoryview]],
        done: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Fill every part, several at once; `done` is told each one's number, on any thread."""
        path = self._path(key)
        lock, missing = threading.Lock(), [len(into) for _, into in parts]

        def one(number: int, at: int, num_bytes: int) -> None:
            first_byte, into = parts[number]
            self._fill(key, path, first_byte + at, into[at : at + num_bytes])
            with lock:
                missing[number] -= num_bytes
                is_full = missing[number] == 0
            if is_full:
                done(number)

        requests = [
            partial(one, number, at, min(READ_BYTES, len(into) - at))
            for number, (_, into) in enumerate(parts)
            for at in range(0, max(len(into), 1), READ_BYTES)
        ]
        with Workers(min(NUM_READERS, len(requests)), "trainckpt-read") as workers:
            for request in requests:
                if len(requests) == 1:
                    request()
                else:
                    workers.submit(request)
            workers.settle()

    def list(self, folder: str) -> list[str]:
        """Names in `folder`, sorted, temporary ones left out; empty if there is none."""
        return [name for name in self._names(folder) if not name.startswith(TEMPORARY)]

    def entries(self, folder: str) -> Sequence[Entry]:
        """As `list`, temporary ones too, with when each was written, in any order."""
        path = self._path(folder)
        return self._ask(f"list {folder or self.url}", lambda _: self._client.entries(path))

    def age_s(self, key: str) -> float | None:
        """Seconds since `key` was written, by the store's clock if it tells; None if it is gone."""
        path = self._path(key)
        return self._ask(f"look at {key}", lambda _: self._client.age_s(path))

    # ---- remove

    def remove(self, key: str) -> None:
        """Remove `key`; durable when it returns."""
        path = self._path(key)
        self._ask(f"remove {key}", lambda _: self._client.remove(path))

    def remove_folder(
        self, folder: str, keep: Collection[str] = (), *, reuse: bool = False
    ) -> None:
        """Remove what is in `folder` but what is called as in `keep`; nothing can be reused."""
        del reuse
        names = [name for name in self._names(folder) if name not in keep]
        with Workers(min(NUM_READERS, len(names)), "trainckpt-remove") as workers:
            for name in names:
                workers.submit(partial(self.remove, f"{folder}/{name}" if folder else name))
            workers.settle()
        if folder and not keep:
            path = self._path(folder)
            self._ask(f"remove {folder}/", lambda _: self._client.remove_marker(path))

    def clear_spares(self) -> None:
        """Nothing is ever put aside."""

    def clear_unfinished(self, folder: str) -> None:
        """What is not finished is no object: see `abort_stale_uploads`."""

    # ---- how it stands

    def health(self) -> Health:
        """Whether the store answers, as far as this process knows."""
        return self._calls.breaker.health()

    def abort_stale_uploads(self, older_than_s: float = STALE_UPLOAD_S) -> int:
        """Drop what writers that died had sent of objects they never finished; how many."""
        return self._ask(
            "abort old uploads",
            lambda _: self._client.abort_uploads(self._root, older_than_s=older_than_s),
        )

    # ---- inside

    def _uploading(
        self, key: str, path: str, size: int
    ) -> AbstractContextManager[tuple[uploads.Put, bool]]:
        return uploads.uploading(self._calls, self._client, path, key, size, self._left)

    def _new(self, key: str) -> str:
        """The path of a key that is not there yet."""
        if self.size(key) is not None:
            raise TierUnavailable(f"{self.url}: cannot write {key}: it is there already")
        return self._path(key)

    def _put(self, key: str, path: str, data: bytes) -> None:
        try:
            self._ask(f"write {key}", lambda _: self._client.put(path, data))
        except BaseException:
            if self._client.put_leaves_parts(len(data)):
                self._left.add(path)
            raise
        if self._left:  # the store answers again
            uploads.drop_left(self._calls, self._client, self._left)

    def _fill(self, key: str, path: str, first_byte: int, into: memoryview) -> None:
        if not len(into):
            return

        def ask(_: int) -> bytes:
            try:
                return self._client.get(path, first_byte, len(into))
            except Exception as error:
                if meaning(error) != BEYOND:
                    raise
                return b""

        data = self._ask(f"read {key}", ask)
        if len(data) != len(into):
            raise UnusableSnapshot(f"{key} ends {len(into) - len(data)} bytes too early")
        into[:] = data

    def _names(self, folder: str) -> Sequence[str]:
        # A folder's marker, which some programs make, has no name in it.
        return sorted({each.name for each in self.entries(folder)} - {""})

    def _probe(self) -> bool:
        """Create one name twice, and see."""
        key = f"{PROBE}/{secrets.token_hex(8)}"
        path = self._path(key)

        def second(_: int) -> bool:
            try:
                self._client.put(path, b"2", create_only=True)
            except Exception as error:
                if meaning(error) != TAKEN:
                    raise
                return True
            return False

        self._put(key, path, b"1")
        try:
            return self._ask(f"create {key}", second)
        finally:
            self.remove(key)

    def _path(self, key: str) -> str:
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise UnusableSnapshot(f"the key {key[:100]!r} leaves the run's place")
        return "/".join([self._root, *parts])

    def _ask(self, what: str, call: Callable[[int], Result]) -> Result:
        return self._calls.make(what, call)
