"""Requests of an object store, one method each, over any library.

Each request is made once, within a time limit, and raises the library's error. `retry` repeats
requests, `store_errors` classifies errors. Any thread may call. No cache is used.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import url_to_fs

from trainckpt.errors import UnusableSnapshot
from trainckpt.storage.store_errors import ABSENT, TAKEN, meaning

if TYPE_CHECKING:
    from collections.abc import Callable

    Result = TypeVar("Result")

UNCACHED = {"skip_instance_cache": True, "use_listings_cache": False}
CALL_S, DATA_S = 60.0, 300.0  # limits of one try: a small request, and one with data
MARK = "trainckpt"  # metadata key: random mark of the request writing the object
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True)
class Entry:
    """One name in a folder.

    Attributes:
        name: Without the folder.
        modified_s: Time of the last write in seconds, by the store's clock; None: unknown.
    """

    name: str
    modified_s: float | None = None


class Stat(NamedTuple):
    """State of one object.

    Attributes:
        size: Bytes.
        written_s: Time of the last write; None: unknown.
        date: Time of the answer by the store's clock, as in an HTTP header; None: unknown.
        mark: Mark of the request that wrote it; None: it has none.
    """

    size: int
    written_s: float | None
    date: str | None = None
    mark: str | None = None


class Upload(Protocol):
    """An unfinished object, in parts numbered from 1. It does not exist before `complete`.

    Attributes:
        in_order: Parts must be sent one after another.
        again: A failed part, or `complete`, may be repeated.
    """

    in_order: bool
    again: bool

    def part(self, number: int, data: bytes) -> None:
        """Send one part."""

    def complete(self) -> None:
        """Make the parts one object."""

    def abort(self) -> None:
        """Drop the parts."""


class ObjectClient:
    """An object store through fsspec. A path is `bucket/key`."""

    extra = ""  # extra of this package with the needed libraries
    example = "s3://bucket/run"
    login = ""  # hint for errors about credentials
    # True for kinds of stores with conditional creation; each location is still probed.
    may_create_only = False
    most_whole_bytes: float = float("inf")  # a failed `put` of more may leave parts behind

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    @classmethod
    def open(cls, url: str) -> tuple[Any, str]:
        """Return the file system for a URL, and the path in it."""
        # In a chain the path is the last one's: simplecache::s3://bucket/run
        found = url_to_fs(url, **UNCACHED)
        return found[0], found[1]

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """Write one object atomically; readers see the old one or the new one."""
        mark = secrets.token_hex(4)  # unique among concurrent writers of this object
        try:
            self._put(path, data, mark, create_only=create_only)
        except Exception as error:
            # aiohttp repeats a request on its own if the connection broke before the answer.
            if not create_only or meaning(error) != TAKEN:
                raise
            found = self.stat(path)
            if found is None or found.mark != mark:
                raise

    def _put(self, path: str, data: bytes, mark: str, *, create_only: bool) -> None:
        del mark, create_only  # not in other protocols
        self._ask("pipe_file", DATA_S, path, data)

    def stat(self, path: str) -> Stat | None:
        """Return the state of an object; None if it is missing."""
        found = unless_absent(lambda: self._ask("info", CALL_S, path))
        if found is None or found["type"] != "file":
            return None
        return Stat(int(found["size"]), _modified_s(found))

    def size(self, path: str) -> int | None:
        """Return the bytes of an object; None if it is missing."""
        found = self.stat(path)
        return None if found is None else found.size

    def get(self, path: str, first_byte: int, num_bytes: int) -> bytes:
        """Return `num_bytes` from `first_byte` on, or fewer at the object's end."""
        end = first_byte + num_bytes
        data: bytes = self._ask("cat_file", DATA_S, path, start=first_byte, end=end)
        return data

    def whole(self, path: str, max_bytes: int) -> bytes:
        """Return a small object."""
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(path)
        must_be_small(path, size, max_bytes)
        return self.get(path, 0, size) if size else b""

    def entries(self, folder: str) -> list[Entry]:
        """Return the names in a folder, including subfolders, in any order."""
        try:
            found = self._ask("ls", CALL_S, folder, detail=True)
        except FileNotFoundError:
            return []
        if [each["name"].strip("/") for each in found] == [folder] and found[0]["type"] == "file":
            raise NotADirectoryError(folder)
        names = [each["name"].rstrip("/").rpartition("/")[2] for each in found]
        return [Entry(n, _modified_s(each)) for n, each in zip(names, found, strict=True)]

    def remove(self, path: str) -> None:
        """Remove an object; a missing one is no error."""
        unless_absent(lambda: self._ask("rm_file", CALL_S, path))

    def remove_marker(self, path: str) -> None:
        """Remove the marker of an empty folder, in stores with such markers."""

    def age_s(self, path: str) -> float | None:
        """Return an object's age in seconds; None if it is missing or its write time is unknown.

        This host's clock counts unless the client knows the store's.
        """
        found = self.stat(path)
        if found is None or found.written_s is None:
            return None
        now_s = parsedate_to_datetime(found.date).timestamp() if found.date else time.time()
        return max(0.0, now_s - found.written_s)

    def begin(self, path: str, part_bytes: int) -> Upload:
        """Begin an object sent in parts of `part_bytes`, except the last."""
        return _StreamedUpload(self._fs, path, part_bytes)

    def abort_uploads(self, path: str, *, older_than_s: float = 0.0) -> int:
        """Abort unfinished uploads at or under this path; return their number."""
        del path, older_than_s
        return 0  # no such request in other protocols: the store drops them by itself

    def must_have_bucket(self, path: str) -> None:
        """Raise the store's error if the bucket of `path` is missing."""

    def _ask(self, method: str, within_s: float, path: str, *args: Any, **keywords: Any) -> Any:
        self._fs.invalidate_cache()
        if isinstance(self._fs, AsyncFileSystem):
            call = getattr(self._fs, f"_{method}")
            return self._wait_for(call, within_s, path, *args, **keywords)
        return getattr(self._fs, method)(path, *args, **keywords)

    def _wait_for(self, call: Any, within_s: float, *args: Any, **keywords: Any) -> Any:
        return sync(self._fs.loop, call, *args, timeout=within_s, **keywords)


class _StreamedUpload:
    """Upload through the library's own file object: in order, each part once."""

    in_order = True
    again = False

    def __init__(self, filesystem: Any, path: str, part_bytes: int) -> None:
        self._filesystem, self._path, self._at = filesystem, path, path
        if filesystem.exists(path):  # some libraries drop the old object before the new is whole
            folder = path.rpartition("/")[0]
            self._at = f"{folder}/.tmp-copy-{secrets.token_hex(8)}"
        self._file = filesystem.open(self._at, "wb", block_size=part_bytes)
        self._num_bytes = 0

    def part(self, number: int, data: bytes) -> None:
        del number
        self._num_bytes += len(data)
        self._file.write(data)

    def complete(self) -> None:
        self._file.close()
        if self._at != self._path:
            self._filesystem.mv(self._at, self._path)

    def abort(self) -> None:
        """Drop the parts; closing the file would make it an object."""
        self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True
        with contextlib.suppress(FileNotFoundError):  # many libraries have no object yet
            # A longer object is another writer's, finished meanwhile.
            if self._filesystem.info(self._at)["size"] <= self._num_bytes:
                self._filesystem.rm_file(self._at)


def must_be_small(path: str, size: int, max_bytes: int) -> None:
    """Refuse an object of more than `max_bytes`."""
    if size > max_bytes:
        raise UnusableSnapshot(f"{path} has {size} bytes, more than {max_bytes}")


def unless_absent(call: Callable[[], Result]) -> Result | None:
    """Return the result; None if the object is missing, but not if the bucket is."""
    try:
        return call()
    except Exception as error:
        if meaning(error) != ABSENT:
            raise
    return None


def _modified_s(found: dict[str, Any]) -> float | None:
    times = (to_seconds(found.get(key)) for key in _TIMES)
    return next((each for each in times if each is not None), None)


def to_seconds(value: object) -> float | None:
    """Return a store's time in seconds; None if it is no time."""
    if isinstance(value, dt.datetime):
        return value.timestamp()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return dt.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except ValueError:
            return None
    return None
