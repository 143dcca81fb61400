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
from typing import Any, Protocol

from fsspec.asyn import AsyncFileSystem, sync

from trainckpt.errors import UnusableSnapshot

CALL_S, DATA_S = 60.0, 300.0  # limits of one try: a small request, and one with data
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

    # True for kinds of stores with conditional creation; each location is still probed.
    may_create_only = False
    login = ""  # hint for errors about credentials

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """Write one object in one request; readers see the old one or the new one."""
        more = {"mode": "create"} if create_only else {}
        self._ask("pipe_file", DATA_S, path, data, **more)

    def put_leaves_parts(self, num_bytes: int) -> bool:
        """Return True if a failed `put` of `num_bytes` may leave parts behind."""
        del num_bytes
        return False

    def size(self, path: str) -> int | None:
        """Return the bytes of an object; None if it is missing."""
        found = self._found(path)
        return None if found is None else int(found["size"])

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
        return [Entry(_last(each["name"]), _modified_s(each)) for each in found]

    def remove(self, path: str) -> None:
        """Remove an object; a missing one is no error."""
        try:
            self._ask("rm_file", CALL_S, path)
        except FileNotFoundError:
            pass

    def remove_marker(self, path: str) -> None:
        """Remove the marker of an empty folder, in stores with such markers."""

    def age_s(self, path: str) -> float | None:
        """Return an object's age in seconds; None if it is missing or its write time is unknown.

        This host's clock counts unless the client knows the store's.
        """
        found = self._found(path)
        written_s = None if found is None else _modified_s(found)
        return None if written_s is None else max(0.0, time.time() - written_s)

    def begin(self, path: str, part_bytes: int) -> Upload:
        """Begin an object sent in parts of `part_bytes`, except the last."""
        return _StreamedUpload(self._fs, path, part_bytes)

    def abort_uploads(self, path: str, *, older_than_s: float = 0.0) -> int:
        """Abort unfinished uploads at or under this path; return their number."""
        del path, older_than_s
        return 0  # no such request in other protocols: the store drops them by itself

    def must_have_bucket(self, path: str) -> None:
        """Raise the store's error if the bucket of `path` is missing."""

    def _found(self, path: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._ask("info", CALL_S, path)
        except FileNotFoundError:
            return None
        return found if found["type"] == "file" else None

    def _ask(self, method: str, within_s: float, path: str, *args: Any, **keywords: Any) -> Any:
        self._fs.invalidate_cache()
        if isinstance(self._fs, AsyncFileSystem):
            return self._wait_for(
                getattr(self._fs, f"_{method}"), within_s, path, *args, **keywords
            )
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


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


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
