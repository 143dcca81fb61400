"""The object-store tier: keys of a run as objects in a bucket, laid out like files in a directory.

    write        small objects in one request. Larger ones in parts, several in flight; the
                 request joining them comes last. A failed upload is aborted and leaves no object
    replace      one request: readers see the old bytes or the new ones
    create       a request refused by the store if the name exists. A probe tries this once; in
                 stores without it, ranks claim names (below)
    read_parts   ranged requests, several in flight, of just the wanted bytes

An answered write is durable. There are no folders: an empty prefix does not exist. Every request
has a time limit and is retried (`retry`).
"""

from __future__ import annotations

import secrets
import threading
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from trainckpt.errors import ConfigurationError, TierUnavailable, UnusableSnapshot
from trainckpt.storage import multipart_upload
from trainckpt.storage.client_libraries import give_own_randomness
from trainckpt.storage.local import TEMPORARY, key_parts
from trainckpt.storage.redact import redacted
from trainckpt.storage.retry import Limits, RetryPolicy, draw_own
from trainckpt.storage.store_errors import BEYOND, TAKEN, is_starved, meaning, starved
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager

    from trainckpt.storage.object_client import Entry, ObjectClient
    from trainckpt.storage.retry import Health

    Result = TypeVar("Result")

PROBE = "probe"
READ_BYTES = 16 << 20  # per request
NUM_READERS = 8
STALE_UPLOAD_S = 24 * 3600.0
CLAIM = f"{TEMPORARY}claim-"
STALE_CLAIM_S = 60.0
CLAIM_FOR_S, CLAIM_PAUSE_S, LONGEST_CLAIM_PAUSE_S = 90.0, 0.05, 2.0


def open_object_store(
    url: str, limits: Limits | None = None, name: str | None = None
) -> ObjectStoreTier:
    """Return the tier at `url`, such as `s3://bucket/run`, without a request.

    Args:
        url: Of the store and the folder in it.
        limits: Of its calls.
        name: Of the tier; None: the kind of store.

    Raises:
        ConfigurationError: unknown kind of store, or its package is not installed.
        TierUnavailable: this host has no thread, descriptor or memory left for it.
    """
    kind, client, root = _open_client(url, redacted(url))
    give_own_randomness()
    calls = RetryPolicy(redacted(url), limits, login=client.login)
    return ObjectStoreTier(name or kind, redacted(url).rstrip("/"), client, root, calls)


def _open_client(url: str, shown: str) -> tuple[str, ObjectClient, str]:
    """Return the name of the kind of store, its client, and the path at `url`, as `bucket/key`."""
    from fsspec.core import split_protocol  # here, as all of fsspec: for stores only

    from trainckpt.storage.azure_client import AzureClient
    from trainckpt.storage.gcs_client import GcsClient
    from trainckpt.storage.object_client import ObjectClient
    from trainckpt.storage.s3_client import S3Client

    s3, google = dict.fromkeys(("s3", "s3a"), S3Client), dict.fromkeys(("gs", "gcs"), GcsClient)
    azure = dict.fromkeys(("az", "abfs", "abfss"), AzureClient)
    if "\0" in url:
        raise ConfigurationError(f"the run directory is not a valid URL: {shown[:100]!r}")
    protocol = split_protocol(url)[0] or ""
    kind: type[ObjectClient] = {**s3, **google, **azure}.get(protocol, ObjectClient)
    if kind in (GcsClient, AzureClient) and "?" in url:
        raise ConfigurationError(
            f"{shown}: a query in the URL is not supported",
            hint=f"leave it out; credentials come from the environment: {kind.login}",
        )
    try:
        filesystem, path = kind.open(url)
        root = path.strip("/")
    except ImportError as error:
        hint = f'pip install "trainckpt[{kind.extra}]"'
        raise ConfigurationError(
            f"{shown}: the client library of this store is not installed",
            hint=hint if kind.extra else f"install the fsspec package for {protocol}://",
        ) from error
    except Exception as error:  # noqa: BLE001 - libraries of others, on what a user wrote
        what = redacted(" ".join(str(error).split())) or type(error).__name__
        if is_starved(error):
            raise starved(f"{shown}: cannot open this store", Exception(what[:300])) from None
        hint = f"name a directory, or {kind.example}"
        # Not `from error`: it may quote a secret of the environment.
        raise ConfigurationError(f"{shown}: {what[:300]}", hint=kind.login or hint) from None
    if not root:
        raise ConfigurationError(f"{shown} names no bucket", hint=f"name one: {kind.example}")
    return ("s3" if protocol in s3 else protocol), kind(filesystem), root


class ObjectStoreTier:
    """Named bytes in one store. See `base.Tier` for the contract.

    Attributes:
        url: URL without secrets.
    """

    def __init__(
        self, name: str, url: str, client: ObjectClient, root: str, calls: RetryPolicy
    ) -> None:
        self.name, self.url = name, url
        self._client, self._root, self._calls = client, root, calls
        self._probing = threading.Lock()
        self._creates_only: bool | None = None
        self._has_bucket = False
        self._left: set[str] = set()  # paths of uploads not aborted yet: parts may remain

    def at(self, folder: str) -> ObjectStoreTier:
        """Return the tier of a folder in this one, over the same connections."""
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
        """Create `key` with the bytes of `blocks`; durable on return."""
        del held  # blocks are copied
        path = self._path(key) if replacing else self._new(key)
        size = 2 * self._calls.limits.part_bytes
        if num_bytes is not None:  # else the total is unknown
            size = multipart_upload.part_bytes(num_bytes, size)
        parts = multipart_upload.gathered(blocks, size)
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
        """Create `key` with parts at their positions, sent as they come; durable on return."""
        path = self._new(key)
        size = multipart_upload.part_bytes(num_bytes, self._calls.limits.part_bytes)
        if num_bytes <= size:
            pieces = multipart_upload.Pieces(num_bytes, max(num_bytes, 1), in_order=False)
            for first_byte, part in parts:
                pieces.add(first_byte, part)
            pieces.must_be_whole()
            self._put(key, path, pieces.take(1) if num_bytes else b"")
            return
        with self._uploading(key, path, size) as (put, in_order):
            pieces = multipart_upload.Pieces(num_bytes, size, in_order=in_order)
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
            return self._create_by_claim(key, data)

        def ask(tried: int) -> bool:
            try:
                self._client.put(path, data, create_only=True)
            except Exception as error:
                if meaning(error) != TAKEN:
                    raise
                # An earlier try may have succeeded without its answer arriving.
                is_ours = bool(tried) and self._client.size(path) == len(data)
                return is_ours and self._client.whole(path, len(data)) == data
            return True

        return self._ask(f"create {key}", ask)

    def creates_only(self) -> bool:
        """Return True if the store refuses to create an existing name; probed once."""
        with self._probing:
            if self._creates_only is None:
                self._creates_only = self._client.may_create_only and self._probe()
        return self._creates_only

    # Without conditional creation:
    #
    #     1. check the name              exists: return False
    #     2. write a claim               .tmp-claim-<name>-<token>, beside it
    #     3. list the folder             other claims: remove the own one, wait a little, go to 1
    #     4. check the name again        exists: return False
    #     5. write it, remove the claim  return True
    #
    # The store's lists must show every earlier write, as with S3, Google and Azure. Of two callers
    # with claims, the later to list sees the other's claim or finds the name. If both see both,
    # both withdraw and wait for random times. A dead caller's claim counts for a minute, by the
    # store's clock. So a caller suspended for longer between 3 and 5 could overwrite a name created
    # meanwhile.

    def _create_by_claim(self, key: str, data: bytes) -> bool:
        begun_s, bound_s = time.monotonic(), CLAIM_PAUSE_S
        while self.size(key) is None:
            created = self._try_claim(key, data)
            if created is not None:
                return created
            if time.monotonic() - begun_s > CLAIM_FOR_S:
                why = "other processes claim it and do not create it"
                folder = key.rpartition("/")[0]
                raise TierUnavailable(
                    f"{self.url}: cannot create {key}: {why}",
                    hint=f"if no process is left, remove the objects named {CLAIM}* from {folder}/",
                )
            time.sleep(draw_own() * bound_s)
            bound_s = min(2 * bound_s, LONGEST_CLAIM_PAUSE_S)
        return False

    def _try_claim(self, key: str, data: bytes) -> bool | None:
        """Run one round; return None after a tie."""
        folder, slash, name = key.rpartition("/")
        prefix = f"{CLAIM}{name}-"
        own = f"{prefix}{secrets.token_hex(8)}"
        claim = f"{folder}{slash}{own}"
        self.replace(claim, b"claim\n")
        try:
            entries = [each for each in self.entries(folder) if each.name.startswith(prefix)]
            if self.size(key) is not None:
                return False
            written_s = {each.name: each.modified_s for each in entries}
            mine_s = written_s.pop(own, None)
            for other_s in written_s.values():
                if mine_s is None or other_s is None or mine_s - other_s <= STALE_CLAIM_S:
                    return None
            self.replace(key, data)
            return True
        finally:
            self.remove(claim)

    # ---- read

    def size(self, key: str) -> int | None:
        """Return the bytes of `key`; None if it is missing."""
        path = self._path(key)
        found = self._ask(f"look at {key}", lambda _: self._client.size(path))
        if found is None and not self._has_bucket:  # raises if the bucket is missing
            self._ask(f"look at {key}", lambda _: self._client.must_have_bucket(path))
        self._has_bucket = True
        return found

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """Return all bytes of `key`, at most `max_bytes`."""
        path = self._path(key)
        return self._ask(f"read {key}", lambda _: self._client.whole(path, max_bytes))

    def read_into(self, key: str, first_byte: int, into: memoryview) -> None:
        """Fill `into` from `first_byte` on; an object too short is an error."""
        self.read_parts(key, [(first_byte, into)])

    def read_parts(
        self,
        key: str,
        parts: Sequence[tuple[int, memoryview]],
        done: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Fill every part, several at once; `done` gets each part's number, on any thread."""
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
        """Return the names in `folder`, sorted, without temporary ones; empty if there is none."""
        return [name for name in self._names(folder) if not name.startswith(TEMPORARY)]

    def entries(self, folder: str) -> Sequence[Entry]:
        """Return names with their write times, including temporary ones, in any order."""
        path = self._path(folder)
        return self._ask(f"list {folder or self.url}", lambda _: self._client.entries(path))

    def age_s(self, key: str) -> float | None:
        """Return the seconds since `key` was written; None if it is missing.

        The store's clock counts, if the store tells it.
        """
        path = self._path(key)
        return self._ask(f"look at {key}", lambda _: self._client.age_s(path))

    # ---- remove

    def remove(self, key: str) -> None:
        """Remove `key`; durable on return."""
        path = self._path(key)
        self._ask(f"remove {key}", lambda _: self._client.remove(path))

    def remove_folder(self, folder: str, keep: Collection[str] = ()) -> None:
        """Remove the names in `folder` except those in `keep`."""
        names = [name for name in self._names(folder) if name not in keep]
        with Workers(min(NUM_READERS, len(names)), "trainckpt-remove") as workers:
            for name in names:
                workers.submit(partial(self.remove, f"{folder}/{name}" if folder else name))
            workers.settle()
        if folder and not keep:
            path = self._path(folder)
            self._ask(f"remove {folder}/", lambda _: self._client.remove_marker(path))

    def clear_unfinished(self, folder: str) -> None:
        """Do nothing: an unfinished upload is no object. See `abort_stale_uploads`."""

    # ---- how it stands

    def health(self) -> Health:
        """Return the state of calls to the store, as far as this process knows."""
        return self._calls.breaker.health()

    def abort_stale_uploads(self, older_than_s: float = STALE_UPLOAD_S) -> int:
        """Drop the parts sent by dead writers for unfinished objects; return their number."""
        return self._ask(
            "abort old uploads",
            lambda _: self._client.abort_uploads(self._root, older_than_s=older_than_s),
        )

    # ---- inside

    def _uploading(
        self, key: str, path: str, size: int
    ) -> AbstractContextManager[tuple[multipart_upload.Put, bool]]:
        return multipart_upload.uploading(
            self._calls, self._client, path=path, key=key, size=size, left=self._left
        )

    def _new(self, key: str) -> str:
        """Return the path of a key; refuse an existing one."""
        if self.size(key) is not None:
            raise TierUnavailable(f"{self.url}: cannot write {key}: it exists already")
        return self._path(key)

    def _put(self, key: str, path: str, data: bytes) -> None:
        try:
            self._ask(f"write {key}", lambda _: self._client.put(path, data))
        except BaseException:
            if len(data) > self._client.most_whole_bytes:
                self._left.add(path)
            raise
        if self._left:  # the store answers again
            multipart_upload.drop_left(self._calls, self._client, self._left)

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
        # Some programs make a marker object for a folder: its name in the folder is empty. And
        # dots are names to a store.
        return sorted({each.name for each in self.entries(folder)} - {"", ".", ".."})

    def _probe(self) -> bool:
        """Create one name twice; return True if the store refused the second."""
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
        return "/".join([self._root, *key_parts(key)])

    def _ask(self, what: str, call: Callable[[int], Result]) -> Result:
        return self._calls.make(what, call)
