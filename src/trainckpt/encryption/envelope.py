"""The envelope: a key for each snapshot, wrapped for each recipient, and what follows from it.

    chain        the ranks of an attempt share one secret, told once. Each save takes its key from
                 it, and the chain moves on: from what is left no key that was used can be found,
                 so whoever gets into the trainer reads nothing that was saved before
    snapshot's   of it, wrapped for each recipient, the manifest tells; no file is encrypted with it
    file's       follows from it, the file's name and 24 random bytes that stand in the file: a new
                 one for each time that anything is encrypted. So a number serves as nonce

Wrapping: an ephemeral X25519 key, HKDF-SHA256 of the shared secret, AES-256-GCM. That proves
nothing of who wrapped: whoever knows a recipient can encrypt to it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainckpt.encryption.keys import KEY_BYTES, Identity, public_bytes
from trainckpt.encryption.package import derive, must_be_there
from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.encryption import Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NO_NONCE = bytes(12)  # under a key that is used once
SALT_BYTES = 24
A_RANK = "a rank"  # what a letter is bound to


def new_key() -> bytes:
    """32 random bytes."""
    return os.urandom(KEY_BYTES)


class Chain:
    """The keys of an attempt's saves, in their order. Used by one thread."""

    def __init__(self, secret: bytes) -> None:
        self._next, self._number = secret, 1

    def key(self, number: int) -> bytes:
        """That of the save of this number, from 1; each is given once, and none before it after.

        Raises:
            ValueError: it is gone.
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
    """A key that only this recipient can have, and only where the same context is named."""
    must_be_there()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    theirs, ours = public_bytes(recipient), X25519PrivateKey.generate()
    public = ours.public_key().public_bytes_raw()
    shared = ours.exchange(X25519PublicKey.from_public_bytes(theirs))
    cipher = AESGCM(derive(shared, b"trainckpt/wrap", public + theirs))
    return Wrapped(recipient, public + cipher.encrypt(NO_NONCE, key, context.encode()))


def unwrap(wrapped: Wrapped, identity: Identity, context: str) -> bytes:
    """The key again.

    Raises:
        UnusableSnapshot: it was changed, or wrapped for something else.
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
    """What the key of a snapshot is bound to."""
    return f"{snapshot} of run {run}"


def wrap_for_all(
    key: bytes, recipients: Iterable[str], run: str, snapshot: str
) -> tuple[Wrapped, ...]:
    """A snapshot's key, for each recipient."""
    return tuple(wrap(key, each, context(run, snapshot)) for each in recipients)


def unwrap_any(
    wrapped: Sequence[Wrapped], identities: Sequence[Identity], run: str, snapshot: str
) -> bytes:
    """A snapshot's key, for whoever has these identities.

    Raises:
        ConfigurationError: none is one of the recipients, or there is none.
        UnusableSnapshot: one is, and what was wrapped for it was changed.
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
    """A note to whoever has a snapshot's key too."""
    must_be_there()
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt = os.urandom(SALT_BYTES)
    return salt + AESGCM(derive(key, b"trainckpt/note", salt)).encrypt(NO_NONCE, data, None)


def show(key: bytes, hidden: bytes, what: str) -> bytes:
    """The inverse of `hide`.

    Raises:
        UnusableSnapshot: it was changed; says `what`.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt, sealed = hidden[:SALT_BYTES], hidden[SALT_BYTES:]
    try:
        return AESGCM(derive(key, b"trainckpt/note", salt)).decrypt(NO_NONCE, sealed, None)
    except (InvalidTag, ValueError):
        raise UnusableSnapshot(f"{what} was changed") from None


class Letter:
    """A secret for one process from another, over a place where others may read along."""

    def __init__(self) -> None:
        self._identity = Identity.of(new_key())

    @property
    def address(self) -> str:
        """What the other wraps it for."""
        return self._identity.recipient

    def read(self, sealed: bytes) -> bytes:
        """The secret."""
        return unwrap(Wrapped(self.address, sealed), self._identity, A_RANK)
