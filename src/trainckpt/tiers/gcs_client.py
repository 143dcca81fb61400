"""The requests of Google Cloud Storage: conditional creation, uploads that can be continued.

Its JSON protocol, over gcsfs' own session, so credentials and endpoint come from where gcsfs takes
them. The requests are our own, one HTTP request each: gcsfs repeats its own by itself, and then
nobody knows whether one that was refused as a repetition had been made before; and it drops what
tells a missing bucket from a missing object.
"""

from __future__ import annotations

import json
import re
import threading
import time
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from fsspec.asyn import sync

from trainckpt.tiers.connections import close_at_the_end
from trainckpt.tiers.object_client import (
    CALL_S,
    DATA_S,
    Entry,
    ObjectClient,
    Upload,
    must_be_small,
    to_seconds,
)
from trainckpt.tiers.refusals import (
    BEYOND,
    NO_BUCKET,
    Refused,
    is_missing_bucket,
    meaning,
    no_answer_behind,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONNECT_S, SILENT_S = 10.0, 60.0
STEP = 256 << 10  # bytes; what is sent of an unfinished upload comes in multiples of it
INCOMPLETE = 308
MOST_IDLE = 8  # answers after which an upload of which nothing more is taken is given up
_OF_BUCKET = re.compile("/b/[^/]+/o$")  # all other URLs name an object


def open_filesystem(url: str) -> Any:
    """What gcsfs makes of its configuration and the environment.

    Its class for plain HTTP: the other one opens a gRPC channel, which does not survive a fork.
    """
    del url
    from gcsfs.core import GCSFileSystem

    made = GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
    close_at_the_end(made, lambda: (made._session,))
    return made


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class GcsClient(ObjectClient):
    """Google's store, or one that speaks its protocol."""

    may_create_only = True
    login = (
        "log in (gcloud auth application-default login), or let GOOGLE_APPLICATION_CREDENTIALS "
        "name a service account's file; the account needs roles/storage.objectUser on the bucket"
    )

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """Write one object in one request; readers see the old one or the new one."""
        more = {"ifGenerationMatch": "0"} if create_only else {}
        answer = self.ask(
            "POST", self._objects(path, "upload/"), DATA_S, data=data,
            params={"uploadType": "media", "name": _key(path), **more},
        )  # fmt: skip
        if (has := _size(answer)) != len(data):
            raise _no_object(answer, f"it has {has} bytes of {path}, sent were {len(data)}")

    def size(self, path: str) -> int | None:
        """Bytes of an object; None if there is none."""
        found = self._look(path)
        return None if found is None else _size(found)

    def get(self, path: str, first_byte: int, num_bytes: int) -> bytes:
        """So many bytes, or fewer if the object ends before."""
        return self._get(path, first_byte, num_bytes).body

    def whole(self, path: str, max_bytes: int) -> bytes:
        """All of a small object, in one request."""
        try:
            answer = self._get(path, 0, max_bytes + 1)
        except Refused as error:
            if meaning(error) != BEYOND:
                raise
            return b""  # it has no first byte
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        size = int(total) if total.isdigit() else len(answer.body)
        must_be_small(path, size, max_bytes)
        return answer.body

    def entries(self, folder: str) -> list[Entry]:
        """Names in a folder, those of folders in it too, in any order."""
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
        """Remove an object; one that is not there is no error."""
        try:
            self.ask("DELETE", self._object(path))
        except Refused as error:
            if error.status_code != 404 or is_missing_bucket(error):
                raise

    def age_s(self, path: str) -> float | None:
        """Seconds since an object was written, by the store's clock; None if there is none."""
        found = self._look(path)
        written_s = None if found is None else to_seconds(_parsed(found).get("updated"))
        if found is None or written_s is None:
            return None
        told = found.headers.get("Date")
        now_s = parsedate_to_datetime(told).timestamp() if told else time.time()
        return max(0.0, now_s - written_s)

    def begin(self, path: str, part_bytes: int) -> Upload:
        """Begin an object that comes in parts."""
        del part_bytes
        answer = self.ask(
            "POST", self._objects(path, "upload/"),
            params={"uploadType": "resumable", "name": _key(path)},
            data=b"{}", headers={"Content-Type": "application/json"},
        )  # fmt: skip
        if not (session := answer.headers.get("Location")):
            raise _no_object(answer, "it began no upload")
        return _ResumableUpload(self, session)

    def must_have_bucket(self, path: str) -> None:
        """Raise what the store says if there is no such bucket."""
        next(self._pages(path, _key(path), at_once=1))

    def ask(
        self, method: str, url: str, within_s: float = CALL_S, *, params: Mapping[str, str] = {},
        data: bytes | None = None, headers: Mapping[str, str] = {}, also: int = 0,
    ) -> _Answer:  # fmt: skip
        """The answer to one request: 2xx, or `also`.

        Raises:
            Refused: the store said no, or somebody before it, such as a proxy's page for logins.
        """
        self._log_in()
        answer: _Answer = sync(
            self._fs.loop, self._once, method, url, dict(params), data, dict(headers),
            timeout=within_s,
        )  # fmt: skip
        if not 200 <= answer.status < 300 and answer.status != also:
            raise _refused(answer, of_bucket=_OF_BUCKET.search(url) is not None)
        return answer

    def _log_in(self) -> None:
        """Let gcsfs renew the login where it is due.

        It sets no limit to it: so on a thread that nobody has to wait for.
        """
        raised: list[Exception] = []

        def renew() -> None:
            try:
                self._fs.credentials.maybe_refresh()
            except Exception as error:  # noqa: BLE001 - raised below
                raised.append(error)

        if self._fs.credentials.credentials is None:
            return  # asks as nobody
        thread = threading.Thread(target=renew, name="trainckpt-login", daemon=True)
        thread.start()
        thread.join(CALL_S)
        if thread.is_alive():
            raise TimeoutError(f"the login was not renewed within {CALL_S:.0f} s")
        if raised:
            raise no_answer_behind(raised[0]) or raised[0]

    async def _once(
        self, method: str, url: str, params: dict[str, str], data: bytes | None,
        headers: dict[str, str],
    ) -> _Answer:  # fmt: skip
        from aiohttp import ClientTimeout
        from yarl import URL

        await self._fs._set_session()
        async with self._fs.session.request(
            method,
            URL(url, encoded=True).update_query(self._fs._get_params(params)),
            data=BytesIO(data) if data else data,  # sent in pieces: the loop is for others as well
            headers=self._fs._get_headers({"Content-Type": "application/octet-stream", **headers}),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S),
            allow_redirects=False,  # 308 is no redirect here
        ) as answer:
            return _Answer(answer.status, answer.headers, await answer.read())

    def _get(self, path: str, first_byte: int, num_bytes: int) -> _Answer:
        wanted = {"Range": f"bytes={first_byte}-{first_byte + num_bytes - 1}"}
        return self.ask("GET", self._object(path), DATA_S, params={"alt": "media"}, headers=wanted)

    def _look(self, path: str) -> _Answer | None:
        try:
            return self.ask("GET", self._object(path), params={"fields": "size,updated"})
        except Refused as error:
            if error.status_code != 404 or is_missing_bucket(error):
                raise
            return None

    def _pages(self, path: str, prefix: str, at_once: int = 1000) -> Iterator[dict[str, Any]]:
        asked = {
            "prefix": prefix, "delimiter": "/", "maxResults": str(at_once),
            "fields": "items(name,updated),prefixes,nextPageToken",
        }  # fmt: skip
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
    """Parts in order. After an answer that was lost the store is asked how much it has.

    It takes multiples of `STEP` bytes until the last, which says how many there are in all: so the
    last bytes wait here for `complete`.
    """

    in_order = True
    again = True

    def __init__(self, client: GcsClient, session: str) -> None:
        self._client, self._session = client, session
        self._held, self._taken = bytearray(), 0  # the store has so many bytes; what follows them
        self._last, self._unsure, self._idle = 0, False, 0

    def part(self, number: int, data: bytes) -> None:
        """Send one part."""
        if number != self._last:
            self._held += data
            self._last = number
        try:
            while (num_bytes := (len(self._held) - 1) // STEP * STEP) > 0:
                self._send(num_bytes, "*")
        except Refused as error:
            if error.status_code != 404:
                raise
            raise Refused(410, "", "the store has dropped the upload") from error

    def complete(self) -> None:
        """Make it one object."""
        size = self._taken + len(self._held)
        while self._held:
            self._send(len(self._held), str(size))

    def abort(self) -> None:
        """Drop what was sent; 499 says that it is done."""
        try:
            self._client.ask("DELETE", self._session)
        except Refused as error:
            if error.status_code not in (404, 410, 499):
                raise

    def _send(self, num_bytes: int, total: str) -> None:
        """One request; there may be less to send after it, or as much."""
        data, told = b"", "bytes */*"  # asks how much the store has
        if not self._unsure:
            data = bytes(self._held[:num_bytes])
            told = f"bytes {self._taken}-{self._taken + num_bytes - 1}/{total}"
        before, self._unsure = self._taken, True
        self._settle(self._put(data, told))
        self._unsure = False
        self._idle = 0 if self._taken > before else self._idle + 1
        if self._idle > MOST_IDLE:
            raise Refused(410, "", f"the store takes no more than {self._taken} bytes")

    def _put(self, data: bytes, told: str) -> _Answer:
        try:
            # Bytes not by PUT, though the store takes both: aiohttp repeats a PUT, unasked, whose
            # connection broke before the answer.
            return self._client.ask(
                "POST" if data else "PUT",
                self._session,
                DATA_S,
                data=data,
                headers={"Content-Range": told},
                also=INCOMPLETE,
            )
        except Refused as error:
            if error.status_code != 410:
                raise
            raise Refused(404, error.code, str(error)) from error  # the same: there is none

    def _settle(self, answer: _Answer) -> None:
        """Let go of what the store says it has."""
        size = self._taken + len(self._held)
        if answer.status == INCOMPLETE:
            end = answer.headers.get("Range", "").rpartition("-")[2]
            has = (int(end) + 1) // STEP * STEP if end.isdigit() else 0
        else:
            has = _size(answer)
        if not self._taken <= has <= size or (answer.status != INCOMPLETE and has != size):
            raise Refused(410, "", f"the store has {has} bytes, sent were {self._taken} to {size}")
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
    """Bytes of the object that an answer is about."""
    size = str(_parsed(answer).get("size", ""))
    if not size.isdecimal():
        raise _no_object(answer, "it names no object's size")
    return int(size)


def _no_object(answer: _Answer, what: str) -> Refused:
    return Refused(answer.status, "", f"is not what such a store answers: {what}")


def _refused(answer: _Answer, *, of_bucket: bool) -> Refused:
    """What an answer says, in JSON or, from what stands between, in any other way."""
    code, message = "", answer.body[:300].decode(errors="replace") or "without a word"
    try:
        error = json.loads(answer.body)["error"]
        message = str(error["message"])
        code = str(error["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        pass
    if answer.status == 404 and (of_bucket or "bucket does not exist" in message):
        code = NO_BUCKET
    return Refused(answer.status, code, message)
