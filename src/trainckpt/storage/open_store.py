"""Open the client for a store, chosen by the scheme of its URL."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec.config
from fsspec.core import split_protocol, url_to_fs

from trainckpt.errors import ConfigurationError
from trainckpt.storage import azure_client, gcs_client, s3_client
from trainckpt.storage.azure_client import AzureClient
from trainckpt.storage.gcs_client import GcsClient
from trainckpt.storage.object_client import ObjectClient
from trainckpt.storage.redact import redacted
from trainckpt.storage.s3_client import S3Client

if TYPE_CHECKING:
    from collections.abc import Callable


class StoreKind(NamedTuple):
    """One kind of store.

    Attributes:
        extra: Extra of this package with the needed libraries; "": none.
        example: Example of a URL.
        client: Client class.
        open: Returns the client's file system for a URL, and the path in it.
    """

    extra: str
    example: str
    client: type[ObjectClient]
    open: Callable[[str], tuple[Any, str]]


def _through_fsspec(url: str, **options: Any) -> tuple[Any, str]:
    # In a chain the path is the last one's: simplecache::s3://bucket/run
    found = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
    return found[0], found[1]


def _s3(url: str) -> tuple[Any, str]:
    configured = fsspec.config.conf.get(split_protocol(url)[0], {})
    return _through_fsspec(url, **s3_client.options(configured))


def _own_client(make: Callable[[str], Any], url: str) -> tuple[Any, str]:
    filesystem = make(url)
    return filesystem, filesystem._strip_protocol(url)


_S3 = StoreKind("s3", "s3://bucket/run", S3Client, _s3)
_GCS = StoreKind(
    "gcs", "gs://bucket/run", GcsClient, partial(_own_client, gcs_client.open_filesystem)
)
_AZURE = StoreKind(
    "azure", "az://container/run", AzureClient, partial(_own_client, azure_client.open_filesystem)
)
_OTHER = StoreKind("", "s3://bucket/run", ObjectClient, _through_fsspec)
_KINDS = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
}


def open_client(url: str) -> tuple[str, ObjectClient, str]:
    """Return the name of the kind of store, its client, and the path at `url`, as `bucket/key`.

    Raises:
        ConfigurationError: unknown kind of store, missing package, or unusable settings in the URL
            or
            the environment.
    """
    shown = redacted(url)
    if "\0" in url:
        raise ConfigurationError(f"the run directory is not a valid URL: {shown[:100]!r}")
    protocol = split_protocol(url)[0] or ""
    kind = _KINDS.get(protocol, _OTHER)
    if kind in (_GCS, _AZURE) and "?" in url:
        raise ConfigurationError(
            f"{shown}: a query in the URL is not supported",
            hint=f"leave it out; credentials come from the environment: {kind.client.login}",
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
        hint = f"name a directory, or {kind.example}"
        # Not `from error`: it may quote a secret of the environment.
        raise ConfigurationError(f"{shown}: {what[:300]}", hint=kind.client.login or hint) from None
    if not root:
        raise ConfigurationError(f"{shown} names no bucket", hint=f"name one: {kind.example}")
    return ("s3" if kind is _S3 else protocol), kind.client(filesystem), root
