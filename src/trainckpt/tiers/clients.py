"""Which client speaks to which kind of store, by the beginning of its URL."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec.config
from fsspec.core import split_protocol, url_to_fs

from trainckpt.errors import ConfigurationError
from trainckpt.tiers import azure_client, gcs_client, s3_client
from trainckpt.tiers.azure_client import AzureClient
from trainckpt.tiers.gcs_client import GcsClient
from trainckpt.tiers.object_client import ObjectClient
from trainckpt.tiers.redacted import redacted
from trainckpt.tiers.s3_client import S3Client

if TYPE_CHECKING:
    from collections.abc import Callable


class Kind(NamedTuple):
    """One kind of store.

    Attributes:
        extra: Of this package, that brings what it needs; "": of none.
        example: How a place in it is named.
        client: That speaks to it.
        open: Makes what the client is given, of the URL, and the path in it.
    """

    extra: str
    example: str
    client: type[ObjectClient]
    open: Callable[[str], tuple[Any, str]]


def _through_fsspec(url: str, **options: Any) -> tuple[Any, str]:
    # The path is of the last in a chain: simplecache::s3://bucket/run
    found = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
    return found[0], found[1]


def _s3(url: str) -> tuple[Any, str]:
    configured = fsspec.config.conf.get(split_protocol(url)[0], {})
    return _through_fsspec(url, **s3_client.options(configured))


def _own(make: Callable[[str], Any], url: str) -> tuple[Any, str]:
    filesystem = make(url)
    return filesystem, filesystem._strip_protocol(url)


_S3 = Kind("s3", "s3://bucket/run", S3Client, _s3)
_GCS = Kind("gcs", "gs://bucket/run", GcsClient, partial(_own, gcs_client.open_filesystem))
_AZURE = Kind(
    "azure", "az://container/run", AzureClient, partial(_own, azure_client.open_filesystem)
)
_OTHER = Kind("", "s3://bucket/run", ObjectClient, _through_fsspec)
_KINDS = {
    "s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS,
    "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE,
}  # fmt: skip


def open_client(url: str) -> tuple[str, ObjectClient, str]:
    """What the kind of store is called, its client, and the path at `url`, as `bucket/key`.

    Raises:
        ConfigurationError: no such kind of store, its package is not installed, or it cannot even
            be asked with what the URL and the environment say.
    """
    shown = redacted(url)
    if "\0" in url:
        raise ConfigurationError(f"the run's place is no URL: {shown[:100]!r}")
    protocol = split_protocol(url)[0] or ""
    kind = _KINDS.get(protocol, _OTHER)
    if kind in (_GCS, _AZURE) and "?" in url:
        raise ConfigurationError(
            f"{shown}: a query in the URL is not understood",
            hint=f"leave it out; credentials come from the environment: {kind.client.login}",
        )
    try:
        filesystem, path = kind.open(url)
        root = path.strip("/")
    except ImportError as error:
        hint = f'pip install "trainckpt[{kind.extra}]"'
        raise ConfigurationError(
            f"{shown}: what speaks to such a store is not installed",
            hint=hint if kind.extra else f"install what reads {protocol}://",
        ) from error
    except Exception as error:  # noqa: BLE001 - libraries of others, on what a user wrote
        what = redacted(" ".join(str(error).split())) or type(error).__name__
        hint = f"name a directory, or {kind.example}"
        # Not `from error`: what it quotes of the environment may be a secret.
        raise ConfigurationError(f"{shown}: {what[:300]}", hint=kind.client.login or hint) from None
    if not root:
        raise ConfigurationError(f"{shown} names no bucket", hint=f"name one: {kind.example}")
    return ("s3" if kind is _S3 else protocol), kind.client(filesystem), root
