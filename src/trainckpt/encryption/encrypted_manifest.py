"""Encrypt and decrypt the manifest of an encrypted snapshot.

Encrypted are the plain files' lengths and header digests. Every other field of the manifest is
authenticated with them, except the wrapped keys: only those can be changed (`rewrap`).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.encryption.keys import derive, must_be_there
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import encryption, json_io
from trainckpt.format import manifest as manifests
from trainckpt.format.encryption import Encryption
from trainckpt.format.files import FileEntry, Files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.encryption import Wrapped
    from trainckpt.format.manifest import Manifest

NONCE_BYTES = 12


def seal(manifest: Manifest, key: bytes, keys: Mapping[str, tuple[Wrapped, ...]]) -> Manifest:
    """Return the manifest to commit.

    Args:
        manifest: All its files are encrypted, and have their plain lengths and digests.
        key: The snapshot's.
        keys: Wrapped keys: its own, and those of the snapshots it refers to.
    """
    must_be_there()
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    plain = encryption.plain_to_json(manifest.files, _in_order(manifest))
    # As a reader does: layouts are numbered in the order of the tensors.
    manifest = replace(manifest, tensors=dict(sorted(manifest.tensors.items())))
    unsealed = replace(manifest, encryption=Encryption(keys, b""))
    nonce = os.urandom(NONCE_BYTES)
    cipher = AESGCM(derive(key, b"trainckpt/manifest"))
    sealed = cipher.encrypt(nonce, json_io.canonical(plain), manifests.bound(unsealed))
    return replace(manifest, encryption=Encryption(keys, nonce + sealed))


def open_sealed(manifest: Manifest, key: bytes) -> Manifest:
    """Return the manifest with its files' plain lengths and digests, all fields authenticated.

    Raises:
        UnusableSnapshot: It differs from the manifest encrypted with this key.
    """
    must_be_there()
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    assert manifest.encryption is not None
    what = f"the manifest of {manifest.name}"
    data = manifest.encryption.sealed
    try:
        cipher = AESGCM(derive(key, b"trainckpt/manifest"))
        text = cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], manifests.bound(manifest))
    except (InvalidTag, ValueError):
        raise UnusableSnapshot(
            f"{what} was changed by somebody who has not its key, or belongs to another snapshot"
        ) from None
    told = json.loads(text)
    files, reached = Files.of(manifest.files), _in_order(manifest)
    opened = Files(files.sizes, files.digests, files.headers, files.names)
    opened.sealed = True
    opened.plain = encryption.plain_from_json(told, "files", len(files), what)
    plain = encryption.plain_from_json(told, "reached", len(reached), what)
    return replace(
        manifest,
        files=opened,
        reached=tuple(replace(f, plain=p) for f, p in zip(reached, plain, strict=True)),
    )


def _in_order(manifest: Manifest) -> list[FileEntry]:
    return sorted(manifest.reached, key=lambda file: file.name)
