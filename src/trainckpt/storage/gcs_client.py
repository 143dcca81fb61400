"""Requests to Google Cloud Storage: conditional creation, resumable uploads.

They use its JSON protocol over gcsfs's session, so credentials and endpoint come from gcsfs's
sources. gcsfs's own requests do not fit: gcsfs repeats them by itself, so nothing tells a
repetition from a first try. It also drops the difference between a missing bucket and a missing
object. So each request here is one HTTP request.
"""

from __future__ import annotations

import json
import re
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from fsspec.asyn import sync

from trainckpt.storage.connections import close_at_the_end
from trainckpt.storage.object_client import (
    CALL_S,
    DATA_S,
    UNCACHED,
    Entry,
    ObjectClient,
    Stat,
    Upload,
    must_be_small,
    to_seconds,
    unless_absent,
)
from trainckpt.storage.store_errors import BEYOND, NO_BUCKET, StoreError, meaning, no_answer_behind
from trainckpt.storage.worker_pool import aside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONNECT_S, SILENT_S = 10.0, 60.0
STEP = 256 << 10  # bytes; all but the last request of an upload carry multiples of it
INCOMPLETE = 308
MOST_IDLE = 8  # answers without progress, before an upload is given up
_OF_BUCKET = re.compile("/b/[^/]+/o$")  # all other URLs name an object


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class GcsClient(ObjectClient):
    """Client of Google's store or a compatible one."""

    extra, example = "gcs", "gs://bucket/run"
    may_create_only = True
    login = (
        "log in (gcloud auth application-default login), or let GOOGLE_APPLICATION_CREDENTIALS "
        "name a service account's file; the account needs roles/storage.objectUser on the bucket"
    )

    @classmethod
    def open(cls, url: str) -> tuple[Any, str]:
        """Return the file system for a URL, and the path in it.

        The class for plain HTTP: the other one opens a gRPC channel, broken by a fork.
        """
        from gcsfs.core import GCSFileSystem

        made = GCSFileSystem(**UNCACHED)
        close_at_the_end(made, lambda: (made._session,))
        return made, made._strip_protocol(url)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        # Without a mark: aiohttp never repeats a POST.
        more = {"ifGenerationMatch": "0"} if create_only else {}
        answer = self.ask(
            "POST",
            self._objects(path, "upload/"),
            DATA_S,
            data=data,
            params={"uploadType": "media", "name": _key(path), **more},
        )
        if (has := _size(answer)) != len(data):
            raise _no_object(answer, f"it has {has} bytes of {path}, {len(data)} were sent")

    def stat(self, path: str) -> Stat | None:
        about = {"fields": "size,updated"}
        found = unless_absent(lambda: self.ask("GET", self._object(path), params=about))
        if found is None:
            return None
        written_s = to_seconds(_parsed(found).get("updated"))
        return Stat(_size(found), written_s, found.headers.get("Date"))

    def get(self, path: str, first_byte: int, num_bytes: int) -> bytes:
        return self._get(path, first_byte, num_bytes).body

    def whole(self, path: str, max_bytes: int) -> bytes:
        try:
            answer = self._get(path, 0, max_bytes + 1)
        except StoreError as error:
            if meaning(error) != BEYOND:
                raise
            return b""  # an empty object has no first byte
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        size = int(total) if total.isdigit() else len(answer.body)
        must_be_small(path, size, max_bytes)
        return answer.body

    def entries(self, folder: str) -> list[Entry]:
        prefix = f"{_key(folder)}/" if _key(folder) else ""
        found: list[Entry] = []
        for page in self._pages(folder, prefix):
            found += [
                Entry(each["name"][len(prefix) :], to_seconds(each.get("updated")))
                for each in page.get("items", ())
            ]
            found += [Entry(each[len(prefix) : -1]) for each in page.get("prefixes", ())]
        return found

    def remove(self, path: str) -> None:
        unless_absent(lambda: self.ask("DELETE", self._object(path)))

    def begin(self, path: str, part_bytes: int) -> Upload:
        del part_bytes
        answer = self.ask(
            "POST",
            self._objects(path, "upload/"),
            params={"uploadType": "resumable", "name": _key(path)},
            data=b"{}",
            headers={"Content-Type": "application/json"},
        )
        if not (session := answer.headers.get("Location")):
            raise _no_object(answer, "no upload was begun")
        return _ResumableUpload(self, session)

    def must_have_bucket(self, path: str) -> None:
        next(self._pages(path, _key(path), at_once=1))

    def ask(
        self,
        method: str,
        url: str,
        within_s: float = CALL_S,
        *,
        params: Mapping[str, str] = {},
        data: bytes | None = None,
        headers: Mapping[str, str] = {},
        also: int = 0,
    ) -> _Answer:
        """Return the answer to one request, with status 2xx or `also`.

        Raises:
            StoreError: the store, or a proxy before it, such as a login page, refused.
        """
        self._log_in()
        arguments = method, url, dict(params), data, dict(headers)
        answer: _Answer = sync(self._fs.loop, self._once, *arguments, timeout=within_s)
        if not 200 <= answer.status < 300 and answer.status != also:
            raise _refused(answer, of_bucket=_OF_BUCKET.search(url) is not None)
        return answer

    def _log_in(self) -> None:
        """Let gcsfs renew its login if due.

        The renewal has no time limit, so it runs on a thread the caller can abandon.
        """
        if self._fs.credentials.credentials is None:
            return  # anonymous requests
        renewed = aside(self._fs.credentials.maybe_refresh)(CALL_S)
        if renewed is None:
            raise TimeoutError(f"the login was not renewed within {CALL_S:.0f} s")
        try:
            renewed()
        except Exception as error:  # noqa: BLE001 - the cause says more
            raise no_answer_behind(error) or error from None

    async def _once(
        self,
        method: str,
        url: str,
        params: dict[str, str],
        data: bytes | None,
        headers: dict[str, str],
    ) -> _Answer:
        from aiohttp import ClientTimeout
        from yarl import URL

        await self._fs._set_session()
        async with self._fs.session.request(
            method,
            URL(url, encoded=True).update_query(self._fs._get_params(params)),
            data=BytesIO(data) if data else data,  # sent in pieces: the event loop is shared
            headers=self._fs._get_headers({"Content-Type": "application/octet-stream", **headers}),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S),
            allow_redirects=False,  # 308 is no redirect here
        ) as answer:
            return _Answer(answer.status, answer.headers, await answer.read())

    def _get(self, path: str, first_byte: int, num_bytes: int) -> _Answer:
        wanted = {"Range": f"bytes={first_byte}-{first_byte + num_bytes - 1}"}
        return self.ask("GET", self._object(path), DATA_S, params={"alt": "media"}, headers=wanted)

    def _pages(self, path: str, prefix: str, at_once: int = 1000) -> Iterator[dict[str, Any]]:
        asked = {
            "prefix": prefix,
            "delimiter": "/",
            "maxResults": str(at_once),
            "fields": "items(name,updated),prefixes,nextPageToken",
        }
        while True:
            page = _parsed(self.ask("GET", self._objects(path), params=asked))
            yield page
            if not page.get("nextPageToken"):
                return
            asked["pageToken"] = page["nextPageToken"]

    def _objects(self, path: str, kind: str = "") -> str:
        bucket = quote(path.partition("/")[0], safe="")
        return f"{self._fs._location}/{kind}storage/v1/b/{bucket}/o"

    def _object(self, path: str) -> str:
        return f"{self._objects(path)}/{quote(_key(path), safe='')}"


class _ResumableUpload:
    """Parts in order. After a lost answer the client asks the store for the bytes it has.

    The store takes multiples of `STEP` bytes until the last request, with the total length. So the
    last bytes wait here for `complete`.
    """

    in_order = True
    again = True

    def __init__(self, client: GcsClient, session: str) -> None:
        self._client, self._session = client, session
        self._held, self._taken = bytearray(), 0  # bytes not stored yet; number of bytes stored
        self._last, self._unsure, self._idle = 0, False, 0

    def part(self, number: int, data: bytes) -> None:
        if number != self._last:
            self._held += data
            self._last = number
        try:
            while (num_bytes := (len(self._held) - 1) // STEP * STEP) > 0:
                self._send(num_bytes, "*")
        except StoreError as error:
            if error.status_code != 404:
                raise
            raise StoreError(410, "", "the store has dropped the upload") from error

    def complete(self) -> None:
        size = self._taken + len(self._held)
        while self._held:
            self._send(len(self._held), str(size))

    def abort(self) -> None:
        """Drop the parts; status 499 confirms it."""
        try:
            self._client.ask("DELETE", self._session)
        except StoreError as error:
            if error.status_code not in (404, 410, 499):
                raise

    def _send(self, num_bytes: int, total: str) -> None:
        """Make one request; bytes may remain to be sent, even all of them."""
        data, content_range = b"", "bytes */*"  # asks for the number of stored bytes
        if not self._unsure:
            data = bytes(self._held[:num_bytes])
            content_range = f"bytes {self._taken}-{self._taken + num_bytes - 1}/{total}"
        before, self._unsure = self._taken, True
        self._settle(self._put(data, content_range))
        self._unsure = False
        self._idle = 0 if self._taken > before else self._idle + 1
        if self._idle > MOST_IDLE:
            raise StoreError(410, "", f"the store takes no more than {self._taken} bytes")

    def _put(self, data: bytes, content_range: str) -> _Answer:
        try:
            # POST for bytes, though the store takes PUT too: aiohttp repeats a PUT on its own if
            # the connection broke before the answer.
            return self._client.ask(
                "POST" if data else "PUT",
                self._session,
                DATA_S,
                data=data,
                headers={"Content-Range": content_range},
                also=INCOMPLETE,
            )
        except StoreError as error:
            if error.status_code != 410:
                raise
            raise StoreError(404, error.code, str(error)) from error  # same meaning: no upload

    def _settle(self, answer: _Answer) -> None:
        """Drop the bytes the store has."""
        size = self._taken + len(self._held)
        if answer.status == INCOMPLETE:
            end = answer.headers.get("Range", "").rpartition("-")[2]
            has = (int(end) + 1) // STEP * STEP if end.isdigit() else 0
        else:
            has = _size(answer)
        if not self._taken <= has <= size or (answer.status != INCOMPLETE and has != size):
            raise StoreError(
                410, "", f"the store has {has} bytes, {self._taken} to {size} were sent"
            )
        del self._held[: has - self._taken]
        self._taken = has


def _key(path: str) -> str:
    return path.partition("/")[2]


def _parsed(answer: _Answer) -> dict[str, Any]:
    try:
        found = json.loads(answer.body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _no_object(answer, answer.body[:300].decode(errors="replace"))
    return found


def _size(answer: _Answer) -> int:
    """Return the size of the object in an answer."""
    size = str(_parsed(answer).get("size", ""))
    if not size.isdecimal():
        raise _no_object(answer, "no object size")
    return int(size)


def _no_object(answer: _Answer, what: str) -> StoreError:
    return StoreError(answer.status, "", f"unexpected answer of the store: {what}")


def _refused(answer: _Answer, *, of_bucket: bool) -> StoreError:
    """Return an answer's error, from Google's JSON or, sent by a proxy, any other text."""
    code, message = "", answer.body[:300].decode(errors="replace") or "no message"
    try:
        error = json.loads(answer.body)["error"]
        message = str(error["message"])
        code = str(error["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        pass
    if answer.status == 404 and (of_bucket or "bucket does not exist" in message):
        code = NO_BUCKET
    return StoreError(answer.status, code, message)
