"""Requests to Azure's blob store: blocks in any order, conditional creation.

They go through adlfs's client of Microsoft's library, so account and credentials come from adlfs's
sources. The library's retries are off: `RetryPolicy` retries, and must know about earlier tries of
a request refused as a repetition.
"""

from __future__ import annotations

import logging
import secrets
import threading
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fsspec.asyn import sync

from trainckpt.storage.connections import close_at_the_end
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
    to_seconds,
    unless_absent,
)
from trainckpt.storage.store_errors import BEYOND, TAKEN, meaning

if TYPE_CHECKING:
    from collections.abc import Callable

_ONCE = {
    "retry_total": 0,
    "retry_connect": 0,
    "retry_read": 0,
    "retry_status": 0,
    "connection_timeout": 10,
    "read_timeout": 60,
}
AT_ONCE = 1 << 20  # bytes; larger objects are sent as a block
DROPPED = "dropped"  # value of `MARK`: the object is made only to be removed
_LOGS_REQUESTS = "azure.core.pipeline.policies.http_logging_policy"
_FOLDER = "hdi_isfolder"  # metadata key of a folder, in accounts with folders


class AzureClient(ObjectClient):
    """Client of Azure's blob store or a compatible one. A container is a bucket."""

    extra, example = "azure", "az://container/run"
    may_create_only = True
    most_whole_bytes = AT_ONCE
    login = (
        "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and what opens it: "
        "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a login (az login, a managed "
        "identity) with the role Storage Blob Data Contributor"
    )

    @classmethod
    def open(cls, url: str) -> tuple[Any, str]:
        from adlfs import AzureBlobFileSystem

        if not (requests := logging.getLogger(_LOGS_REQUESTS)).level:
            requests.setLevel(logging.WARNING)  # at INFO the library logs twenty lines per request
        in_url = AzureBlobFileSystem._get_kwargs_from_urls(url)
        made = AzureBlobFileSystem(**UNCACHED, **in_url)
        close_at_the_end(made, lambda: (made.service_client, made.credential))
        account, host = made.service_client.account_name, made.service_client.primary_hostname
        if (named := in_url.get("account_name", account)) != account:
            raise ValueError(
                f"the URL names the account {named}, but the connection string {account}"
            )
        _, at, named = urlsplit(url).netloc.rpartition("@")
        # adlfs ignores another host in the URL and uses the environment's.
        if at and "account_name" not in in_url and named.replace(".dfs.", ".blob.") != host:
            raise ValueError(
                f"the URL names the host {named}, but the environment {host}: write container@"
                "ACCOUNT.dfs.core.windows.net, or az://container and the account in the environment"
            )
        return made, made._strip_protocol(url)

    def _put(self, path: str, data: bytes, mark: str, *, create_only: bool) -> None:
        if len(data) <= AT_ONCE:
            more = {"overwrite": not create_only, "metadata": {MARK: mark}}
            self._of_blob(path, "upload_blob", DATA_S, data, **more)
        else:
            block = _block(mark, 0)
            self.stage(path, block, data)
            self.commit(path, [block], create_only=create_only, metadata={MARK: mark})

    def stat(self, path: str) -> Stat | None:
        dates: list[str] = []
        found = self._properties(path, lambda raw: dates.append(raw.http_response.headers["Date"]))
        if found is None:
            return None
        written_s, mark = found.last_modified.timestamp(), found.metadata.get(MARK)
        return Stat(int(found.size), written_s, dates[0] if dates else None, mark)

    def get(self, path: str, first_byte: int, num_bytes: int) -> bytes:
        return self._download(path, first_byte, num_bytes)[0]

    def whole(self, path: str, max_bytes: int) -> bytes:
        try:
            data, size = self._download(path, 0, max_bytes + 1)
        except Exception as error:
            if meaning(error) != BEYOND:
                raise
            return b""  # an empty object has no first byte
        must_be_small(path, size, max_bytes)
        return data

    def entries(self, folder: str) -> list[Entry]:
        container, _, key = folder.partition("/")
        prefix = f"{key}/" if key else ""

        async def read() -> list[Entry]:
            async with self._container(container) as client:
                found = client.walk_blobs(name_starts_with=prefix, delimiter="/", **_ONCE)
                return [_entry(each, prefix) async for each in found]

        entries: list[Entry] = sync(self._fs.loop, read, timeout=CALL_S)
        return entries

    def remove(self, path: str) -> None:
        unless_absent(lambda: self._of_blob(path, "delete_blob", CALL_S))

    def remove_marker(self, path: str) -> None:
        # In accounts with folders (a hierarchical namespace).
        self.remove(path)

    def begin(self, path: str, part_bytes: int) -> Upload:
        del part_bytes  # no request: blocks have names of their own
        return _BlockUpload(self, path)

    def abort_uploads(self, path: str, *, older_than_s: float = 0.0) -> int:
        """Drop the blocks of unfinished objects at or under this path; return their number.

        The store does not say the age of blocks, and drops them itself after a week.
        """
        container, _, key = path.partition("/")
        also = ["metadata"] if older_than_s else ["metadata", "uncommittedblobs"]

        def may_be(each: Any) -> bool:
            # Azurite gives even an object of blocks only an etag.
            dropped = (each.metadata or {}).get(MARK) == DROPPED
            return not each.etag or dropped or not (older_than_s or each.size)

        async def read() -> list[str]:
            async with self._container(container) as client:
                found = client.list_blobs(name_starts_with=key, include=also, **_ONCE)
                return [each.name async for each in found if may_be(each)]

        names = sync(self._fs.loop, read, timeout=CALL_S)
        own = [name for name in names if name == key or name.startswith(f"{key}/")]
        return sum(self.drop(f"{container}/{name}") for name in own)

    def drop(self, path: str) -> bool:
        """Drop the blocks of an unfinished object: commit it without blocks, then remove it.

        Only finishing an object drops its blocks. An object finished by another writer stays.

        Returns:
            False if another writer has finished it.
        """
        from azure.core import MatchConditions

        try:
            etag = self.commit(path, [], create_only=True, metadata={MARK: DROPPED})
        except Exception as error:
            if meaning(error) != TAKEN:
                raise
            found = self._properties(path)
            if found is None or found.metadata.get(MARK) != DROPPED:
                return False
            etag = found.etag
        only = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
        try:
            unless_absent(lambda: self._of_blob(path, "delete_blob", CALL_S, **only))
        except Exception as error:
            if meaning(error) != TAKEN:  # a newer version stays
                raise
        return True

    def stage(self, path: str, block: str, data: bytes) -> None:
        """Send one block of an unfinished object."""
        # A stream is sent in pieces, so other requests get their turn on the event loop.
        self._of_blob(path, "stage_block", DATA_S, block, BytesIO(data), len(data))

    def commit(
        self, path: str, blocks: list[str], *, create_only: bool = False, **more: Any
    ) -> str:
        """Make an object of these blocks, atomically; return its etag."""
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        listed = [BlobBlock(block_id=each) for each in blocks]
        if create_only:
            more["match_condition"] = MatchConditions.IfMissing
        done = self._of_blob(path, "commit_block_list", DATA_S, listed, **more)
        return str(done["etag"])

    def must_have_bucket(self, path: str) -> None:

        async def read() -> None:
            async with self._container(path.partition("/")[0]) as client:
                pages = client.list_blobs(results_per_page=1, **_ONCE).by_page()
                await pages.__anext__()

        sync(self._fs.loop, read, timeout=CALL_S)

    def _properties(self, path: str, look: Callable[[Any], object] | None = None) -> Any | None:
        found = unless_absent(
            lambda: self._of_blob(path, "get_blob_properties", CALL_S, raw_response_hook=look)
        )
        return None if found is None or found.metadata.get(_FOLDER) == "true" else found

    def _download(self, path: str, first_byte: int, num_bytes: int) -> tuple[bytes, int]:
        """Return bytes, and the object's size."""

        async def read() -> tuple[bytes, int]:
            async with self._blob(path) as client:
                found = await client.download_blob(first_byte, num_bytes, **_ONCE)
                return await found.readall(), found.properties.size

        answer: tuple[bytes, int] = sync(self._fs.loop, read, timeout=DATA_S)
        return answer

    def _of_blob(self, path: str, method: str, within_s: float, *args: Any, **more: Any) -> Any:
        async def call() -> Any:
            async with self._blob(path) as client:
                return await getattr(client, method)(*args, **_ONCE, **more)

        return sync(self._fs.loop, call, timeout=within_s)

    def _blob(self, path: str) -> Any:
        container, _, key = path.partition("/")
        return self._fs.service_client.get_blob_client(container, key)

    def _container(self, name: str) -> Any:
        return self._fs.service_client.get_container_client(name)


class _BlockUpload:
    """Blocks in any order, repeatable; committing a list of their names makes the object."""

    in_order = False
    again = True

    def __init__(self, client: AzureClient, path: str) -> None:
        self._client, self._path = client, path
        self._token = secrets.token_hex(4)  # block names unlike those of other writers
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}

    def part(self, number: int, data: bytes) -> None:
        self._client.stage(self._path, _block(self._token, number), data)
        with self._lock:
            self._sizes[number] = len(data)

    def complete(self) -> None:
        """Make the blocks one object.

        All writers of a key write the same bytes. The first to finish makes the store drop the
        blocks of the others.
        """
        blocks = [_block(self._token, number) for number in sorted(self._sizes)]
        try:
            self._client.commit(self._path, blocks)
        except Exception as error:
            if getattr(error, "error_code", None) != "InvalidBlockList":
                raise
            if self._client.size(self._path) != sum(self._sizes.values()):
                raise

    def abort(self) -> None:
        self._client.drop(self._path)


def _block(token: str, number: int) -> str:
    return f"{token}{number:08}"  # Azure wants names of equal length within an object


def _entry(found: Any, prefix: str) -> Entry:
    name = found.name[len(prefix) :].rstrip("/")
    return Entry(name, to_seconds(getattr(found, "last_modified", None)))
