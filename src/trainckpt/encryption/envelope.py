"""Derive a key for each snapshot, and wrap it for each recipient.

    ratchet      the ranks of an attempt share one secret, sent once. Each save derives its key from
                 it and advances the ratchet. Earlier keys cannot be recovered from the rest, so an
                 intruder in the trainer cannot read earlier snapshots
    snapshot     the manifest has its key, wrapped for each recipient; it encrypts no file
    file         its key derives from the snapshot's, the file's name and 24 random bytes in the
                 file: a new one for each encryption. So a number serves as nonce

Wrapping: an ephemeral X25519 key, HKDF-SHA256 of the shared secret, AES-256-GCM. It does not
authenticate the sender: anyone with a recipient's public key can encrypt to it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainckpt.encryption.keys import KEY_BYTES, Identity, derive, must_be_there, public_bytes
from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.encryption import Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NO_NONCE = bytes(12)  # for keys used only once
SALT_BYTES = 24
A_RANK = "a rank"  # the context of a key exchange


def new_key() -> bytes:
    """Return 32 random bytes."""
    return os.urandom(KEY_BYTES)


class KeyRatchet:
    """The keys of an attempt's saves, in their order. Used by one thread."""

    def __init__(self, secret: bytes) -> None:
        self._next, self._number = secret, 1

    def key(self, number: int) -> bytes:
        """Return the key of this save, numbered from 1. Each is returned once, in rising order.

        Raises:
            ValueError: The key is gone.
        """
        if number < self._number:
            raise ValueError(f"the key of save {number} was given already")
        while True:
            found = derive(self._next, b"trainckpt/snapshot")
            self._next = derive(self._next, b"trainckpt/next")
            self._number += 1
            if self._number > number:
                return found


def wrap(key: bytes, recipient: str, context: str) -> Wrapped:
    """Return the key encrypted to this recipient, bound to a context."""
    must_be_there()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    theirs, ours = public_bytes(recipient), X25519PrivateKey.generate()
    public = ours.public_key().public_bytes_raw()
    shared = ours.exchange(X25519PublicKey.from_public_bytes(theirs))
    cipher = AESGCM(derive(shared, b"trainckpt/wrap", public + theirs))
    return Wrapped(recipient, public + cipher.encrypt(NO_NONCE, key, context.encode()))


def unwrap(wrapped: Wrapped, identity: Identity, context: str) -> bytes:
    """Return the key inside.

    Raises:
        UnusableSnapshot: It was changed, or wrapped for another recipient or context.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    public, sealed = wrapped.key[:KEY_BYTES], wrapped.key[KEY_BYTES:]
    try:
        ours = X25519PrivateKey.from_private_bytes(identity.secret)
        shared = ours.exchange(X25519PublicKey.from_public_bytes(public))
        theirs = public_bytes(identity.recipient)
        cipher = AESGCM(derive(shared, b"trainckpt/wrap", public + theirs))
        key = cipher.decrypt(NO_NONCE, sealed, context.encode())
    except (InvalidTag, ValueError):
        raise UnusableSnapshot(f"the key of {context} was changed, or is another's") from None
    if len(key) != KEY_BYTES:
        raise UnusableSnapshot(f"the key of {context} is no key")
    return key


def context(run: str, snapshot: str) -> str:
    """Return the context for the wrapped key of a snapshot."""
    return f"{snapshot} of run {run}"


def wrap_for_all(
    key: bytes, recipients: Iterable[str], run: str, snapshot: str
) -> tuple[Wrapped, ...]:
    """Return a snapshot's key, wrapped for each recipient."""
    return tuple(wrap(key, each, context(run, snapshot)) for each in recipients)


def unwrap_any(
    wrapped: Sequence[Wrapped], identities: Sequence[Identity], run: str, snapshot: str
) -> bytes:
    """Return a snapshot's key, by any of these identities.

    Raises:
        ConfigurationError: No identity is a recipient, or there is none.
        UnusableSnapshot: The wrapped key of a recipient was changed.
    """
    who = ", ".join(each.to[:80] for each in wrapped[:3])
    if not identities:
        raise ConfigurationError(
            f"{snapshot} is encrypted to {who}, and no identity is given",
            hint="TRAINCKPT_IDENTITY=FILE, or --identity FILE, as `trainckpt keygen FILE` wrote it",
        )
    for each in wrapped:
        for identity in identities:
            if each.to == identity.recipient:
                return unwrap(each, identity, context(run, snapshot))
    given = ", ".join(identity.recipient for identity in identities)
    raise ConfigurationError(
        f"{snapshot} is encrypted to {who}; the identity given is of {given}",
        hint="give the identity of one of those with TRAINCKPT_IDENTITY=FILE or --identity FILE; "
        "a file may hold several; who has one can let others in: trainckpt rewrap",
    )


def hide(key: bytes, data: bytes) -> bytes:
    """Encrypt data with a key derived from a snapshot's."""
    must_be_there()
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt = os.urandom(SALT_BYTES)
    return salt + AESGCM(derive(key, b"trainckpt/note", salt)).encrypt(NO_NONCE, data, None)


def show(key: bytes, hidden: bytes, what: str) -> bytes:
    """Decrypt data encrypted by `hide`.

    Raises:
        UnusableSnapshot: It was changed; the message names `what`.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt, sealed = hidden[:SALT_BYTES], hidden[SALT_BYTES:]
    try:
        return AESGCM(derive(key, b"trainckpt/note", salt)).decrypt(NO_NONCE, sealed, None)
    except (InvalidTag, ValueError):
        raise UnusableSnapshot(f"{what} was changed") from None


class KeyExchange:
    """The receiver of one secret from another process, over a channel others may read."""

    def __init__(self) -> None:
        self._identity = Identity.of(new_key())

    @property
    def address(self) -> str:
        """Return the recipient for the sender to wrap the secret for."""
        return self._identity.recipient

    def read(self, sealed: bytes) -> bytes:
        """Return the secret."""
        return unwrap(Wrapped(self.address, sealed), self._identity, A_RANK)
