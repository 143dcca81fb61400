"""Requests of S3: parts in any order, conditional creation, aborting abandoned uploads.

They go through s3fs's client, so credentials, endpoint and region come from s3fs's sources. The
retries of s3fs and botocore are off: `RetryPolicy` retries, and must know about earlier tries of a
request refused as a repetition.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import fsspec.config
from fsspec.core import split_protocol, url_to_fs

from trainckpt.storage.object_client import (
    CALL_S,
    DATA_S,
    MARK,
    UNCACHED,
    Entry,
    ObjectClient,
    Stat,
    Upload,
    must_be_small,
    unless_absent,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONNECT_S, SILENT_S = 10.0, 60.0
_CONNECTIONS = 16


def options(configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for s3fs, on top of its own configuration."""
    own = {
        "connect_timeout": CONNECT_S,
        "read_timeout": SILENT_S,
        "max_pool_connections": _CONNECTIONS,
        # Readers verify every byte by this package's digests; some stores answer a ranged request
        # with the checksum of the whole object.
        "response_checksum_validation": "when_required",
    }
    theirs = dict(configured.get("config_kwargs", {}))
    return {"config_kwargs": {**own, **theirs, "retries": {"total_max_attempts": 1}}}


class S3Client(ObjectClient):
    """Client of S3 or a compatible store."""

    extra = "s3"
    may_create_only = True

    def __init__(self, filesystem: Any) -> None:
        super().__init__(filesystem)
        filesystem.retries = 1

    @classmethod
    def open(cls, url: str) -> tuple[Any, str]:
        configured = fsspec.config.conf.get(split_protocol(url)[0], {})
        found = url_to_fs(url, **UNCACHED, **options(configured))
        return found[0], found[1]

    def _put(self, path: str, data: bytes, mark: str, *, create_only: bool) -> None:
        more = {"Metadata": {MARK: mark}, "IfNoneMatch": "*"} if create_only else {}
        self._call("put_object", DATA_S, **_named(path), Body=data, **more)

    def stat(self, path: str) -> Stat | None:
        found = unless_absent(lambda: self._call("head_object", **_named(path)))
        if found is None:
            return None
        date = found["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        mark = found.get("Metadata", {}).get(MARK)
        return Stat(found["ContentLength"], found["LastModified"].timestamp(), date, mark)

    def whole(self, path: str, max_bytes: int) -> bytes:

        async def read() -> bytes:
            answer = await self._fs._call_s3("get_object", **_named(path))
            async with answer["Body"] as body:
                must_be_small(path, answer["ContentLength"], max_bytes)
                data: bytes = await body.read()
                return data

        found: bytes = self._wait_for(read, DATA_S)
        return found

    def entries(self, folder: str) -> list[Entry]:
        bucket, _, key = folder.partition("/")
        prefix = f"{key}/" if key else ""
        found: list[Entry] = []
        for page in self._pages("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/"):
            found += [
                Entry(each["Key"][len(prefix) :], each["LastModified"].timestamp())
                for each in page.get("Contents", ())
            ]
            prefixes = (each["Prefix"] for each in page.get("CommonPrefixes", ()))
            found += [Entry(each[len(prefix) : -1]) for each in prefixes]
        return found

    def remove(self, path: str) -> None:
        unless_absent(lambda: self._call("delete_object", **_named(path)))

    def begin(self, path: str, part_bytes: int) -> Upload:
        del part_bytes  # S3 takes parts of any length
        answer = self._call("create_multipart_upload", **_named(path))
        return _PartedUpload(self, path, answer["UploadId"])

    def abort_uploads(self, path: str, *, older_than_s: float = 0.0) -> int:
        bucket, _, prefix = path.partition("/")
        aborted = 0
        for page in self._pages("list_multipart_uploads", Bucket=bucket, Prefix=prefix):
            for each in page.get("Uploads", ()):
                own = each["Key"] == prefix or each["Key"].startswith(f"{prefix}/")
                begun_s = each["Initiated"].timestamp() if "Initiated" in each else 0.0
                if own and (not older_than_s or begun_s < time.time() - older_than_s):
                    self.abort(f"{bucket}/{each['Key']}", each["UploadId"])
                    aborted += 1
        return aborted

    def abort(self, path: str, upload: str) -> None:
        """Drop the parts of an upload; a missing one is no error."""
        about = {**_named(path), "UploadId": upload}
        unless_absent(lambda: self._call("abort_multipart_upload", **about))

    def must_have_bucket(self, path: str) -> None:
        bucket, _, prefix = path.partition("/")
        self._call("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)

    def _pages(self, method: str, **keywords: Any) -> Iterator[dict[str, Any]]:
        at: dict[str, Any] = {}
        while True:
            page = self._call(method, **keywords, **at)
            yield page
            if not page.get("IsTruncated"):
                return
            if "NextContinuationToken" in page:
                at = {"ContinuationToken": page["NextContinuationToken"]}
            elif "NextKeyMarker" in page:
                marker = page.get("NextUploadIdMarker", "")
                at = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": marker}
            else:
                return

    def _call(self, method: str, within_s: float = CALL_S, /, **keywords: Any) -> dict[str, Any]:
        call = self._fs._call_s3  # `call_s3` has no time limit
        answer: dict[str, Any] = self._wait_for(call, within_s, method, **keywords)
        return answer

    def _wait_for(self, call: Any, within_s: float, *args: Any, **keywords: Any) -> Any:
        async def ask() -> Any:
            client = await self._fs.set_session()
            # The session's handlers reach clients made later, for buckets of other regions.
            for register in (client.meta.events.register_last, self._fs.session.register):
                register("before-call.s3", _send_unasked, unique_id=_send_unasked.__name__)
            return await call(*args, **keywords)

        return super()._wait_for(ask, within_s)


class _PartedUpload:
    """A multipart upload: parts in any order, repeatable."""

    in_order = False
    again = True

    def __init__(self, client: S3Client, path: str, upload: str) -> None:
        self._client, self._path, self._upload = client, path, upload
        self._about = {**_named(path), "UploadId": upload}
        self._lock = threading.Lock()
        self._parts: dict[int, str] = {}

    def part(self, number: int, data: bytes) -> None:
        about = {**self._about, "PartNumber": number}
        answer = self._client._call("upload_part", DATA_S, **about, Body=data)
        with self._lock:
            self._parts[number] = answer["ETag"]

    def complete(self) -> None:
        parts = [{"PartNumber": n, "ETag": self._parts[n]} for n in sorted(self._parts)]
        about = {**self._about, "MultipartUpload": {"Parts": parts}}
        self._client._call("complete_multipart_upload", DATA_S, **about)

    def abort(self) -> None:
        self._client.abort(self._path, self._upload)


def _send_unasked(params: dict[str, Any], **_: Any) -> None:
    """Send a body at once, without waiting for "100 Continue".

    A server refusing the request unread may wait for the body (rclone's does), and aiohttp waits
    for either answer without a limit.
    """
    params["headers"].pop("Expect", None)


def _named(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}
