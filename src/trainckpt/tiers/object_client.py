"""The requests that an object store answers, one each, of whatever library speaks its protocol.

Each is made once, within a time, and fails as the library says it: `Calls` makes them again,
`refusals` says what they mean. Any thread may make them. Nothing is taken from a cache.
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

CALL_S, DATA_S = 60.0, 300.0  # one try of a small request, and of one that carries data
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True)
class Entry:
    """One name in a folder.

    Attributes:
        name: Without the folder.
        modified_s: When it was last written, in seconds, by the store's clock; None: not known.
    """

    name: str
    modified_s: float | None = None


class Upload(Protocol):
    """An object in the making, of parts numbered from 1. It is not there before `complete`.

    Attributes:
        in_order: Each part comes after the one before it was taken.
        again: A part that failed may be sent again, and so may `complete`.
    """

    in_order: bool
    again: bool

    def part(self, number: int, data: bytes) -> None:
        """Send one part."""

    def complete(self) -> None:
        """Make the parts one object."""

    def abort(self) -> None:
        """Drop what was sent."""


class ObjectClient:
    """An object store through fsspec. A path is `bucket/key`."""

    # Stores known to refuse a second creation when they are asked to; still, each place is probed.
    may_create_only = False
    login = ""  # what to do where the store does not let us in

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """Write one object in one request; readers see the old one or the new one."""
        more = {"mode": "create"} if create_only else {}
        self._ask("pipe_file", DATA_S, path, data, **more)

    def put_leaves_parts(self, num_bytes: int) -> bool:
        """Whether a `put` of so many bytes that failed may have left some of them."""
        del num_bytes
        return False

    def size(self, path: str) -> int | None:
        """Bytes of an object; None if there is none."""
        found = self._found(path)
        return None if found is None else int(found["size"])

    def get(self, path: str, first_byte: int, num_bytes: int) -> bytes:
        """So many bytes, or fewer if the object ends before."""
        end = first_byte + num_bytes
        data: bytes = self._ask("cat_file", DATA_S, path, start=first_byte, end=end)
        return data

    def whole(self, path: str, max_bytes: int) -> bytes:
        """All of a small object."""
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(path)
        must_be_small(path, size, max_bytes)
        return self.get(path, 0, size) if size else b""

    def entries(self, folder: str) -> list[Entry]:
        """Names in a folder, those of folders in it too, in any order."""
        try:
            found = self._ask("ls", CALL_S, folder, detail=True)
        except FileNotFoundError:
            return []
        if [each["name"].strip("/") for each in found] == [folder] and found[0]["type"] == "file":
            raise NotADirectoryError(folder)
        return [Entry(_last(each["name"]), _modified_s(each)) for each in found]

    def remove(self, path: str) -> None:
        """Remove an object; one that is not there is no error."""
        try:
            self._ask("rm_file", CALL_S, path)
        except FileNotFoundError:
            pass

    def remove_marker(self, path: str) -> None:
        """Remove what stands for a folder in which nothing is any more, where there is such."""

    def age_s(self, path: str) -> float | None:
        """Seconds since an object was written; None if there is none.

        By this host's clock, where the store does not say what time it is.
        """
        found = self._found(path)
        written_s = None if found is None else _modified_s(found)
        return None if written_s is None else max(0.0, time.time() - written_s)

    def begin(self, path: str, part_bytes: int) -> Upload:
        """Begin an object that comes in parts of so many bytes, all but the last."""
        return _StreamedUpload(self._fs, path, part_bytes)

    def abort_uploads(self, path: str, *, older_than_s: float = 0.0) -> int:
        """Abort what was begun at this path, or under it, and is not complete; how many."""
        del path, older_than_s
        return 0  # what is known of no other protocol: the store drops them by itself

    def must_have_bucket(self, path: str) -> None:
        """Raise what the store says if the place that should hold `path` is not there at all."""

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
    """Through the library's own file for writing: in order, and each part once."""

    in_order = True
    again = False

    def __init__(self, filesystem: Any, path: str, part_bytes: int) -> None:
        self._filesystem, self._path, self._at = filesystem, path, path
        if filesystem.exists(path):  # not all keep what is there until the new one is finished
            folder = path.rpartition("/")[0]
            self._at = f"{folder}/.tmp-copy-{secrets.token_hex(8)}"
        self._file = filesystem.open(self._at, "wb", block_size=part_bytes)
        self._num_bytes = 0

    def part(self, number: int, data: bytes) -> None:
        """Append it."""
        del number
        self._num_bytes += len(data)
        self._file.write(data)

    def complete(self) -> None:
        """Make it one object."""
        self._file.close()
        if self._at != self._path:
            self._filesystem.mv(self._at, self._path)

    def abort(self) -> None:
        """Drop what was sent; closing the file would make it an object."""
        self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True
        with contextlib.suppress(FileNotFoundError):  # not all know what an unfinished object is
            # What is longer is another's, who has finished it meanwhile.
            if self._filesystem.info(self._at)["size"] <= self._num_bytes:
                self._filesystem.rm_file(self._at)


def must_be_small(path: str, size: int, max_bytes: int) -> None:
    """Refuse to read what is larger than what it should be."""
    if size > max_bytes:
        raise UnusableSnapshot(f"{path} is {size} bytes, more than {max_bytes}")


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _modified_s(found: dict[str, Any]) -> float | None:
    times = (to_seconds(found.get(key)) for key in _TIMES)
    return next((each for each in times if each is not None), None)


def to_seconds(value: object) -> float | None:
    """A time as a store tells it, in seconds; None: it is none."""
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
