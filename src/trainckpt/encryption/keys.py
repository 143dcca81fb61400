"""Users' keys: a recipient (public key) encrypts, and an identity (private key) decrypts.

As text both are lower-case base32 of the 32 bytes of X25519 and four bytes of their SHA-256, so
that a typing error is found. An identity is stored in a file of its own, private to its user:

    # trainckpt identity. Its holder reads what is encrypted to
    # trainckpt-recipient-...
    trainckpt-identity-...

The package `cryptography` is an optional extra, imported only at the first use.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.manifest import Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


RECIPIENT, IDENTITY = "trainckpt-recipient-", "trainckpt-identity-"
KEY_BYTES, CHECK_BYTES = 32, 4
MOST_BYTES = 64 << 10  # read from a file of keys
HOW = "trainckpt keygen FILE makes an identity, and prints its recipient"


@dataclass(frozen=True)
class Identity:
    """A private key. Not in its repr: it must not get into a log.

    Attributes:
        secret: Its 32 bytes.
        recipient: Its public key, as text.
    """

    secret: bytes = field(repr=False)
    recipient: str

    @classmethod
    def of(cls, secret: bytes) -> Identity:
        """Return the identity of these 32 bytes."""
        must_be_there()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        return cls(secret, to_text(RECIPIENT, public))


def generate() -> Identity:
    """Return a new identity."""
    return Identity.of(new_key())


def public_bytes(recipient: str) -> bytes:
    """Return the 32 bytes of a recipient.

    Raises:
        ConfigurationError: It is not a recipient, or mistyped.
    """
    return _from_text(RECIPIENT, recipient)


def to_text(kind: str, key: bytes) -> str:
    """Return a key as text."""
    return kind + base64.b32encode(key + _check(kind, key)).decode("ascii").rstrip("=").lower()


def _from_text(kind: str, text: str) -> bytes:
    body = text.removeprefix(kind)
    try:
        data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
    except (binascii.Error, ValueError):
        data = b""
    key, check = data[:KEY_BYTES], data[KEY_BYTES:]
    if not text.startswith(kind) or check != _check(kind, key) or to_text(kind, key) != text:
        shown = f"{text[:60]!r} is" if kind == RECIPIENT else "what stands there is"
        raise ConfigurationError(f"{shown} no {kind.rstrip('-')}", hint=HOW)
    return key


def _check(kind: str, key: bytes) -> bytes:
    return sha256(kind.encode() + key).digest()[:CHECK_BYTES]


def parse_recipients(words: Iterable[str]) -> tuple[str, ...]:
    """Return recipients, each given as text, or as a file with one on a line.

    Raises:
        ConfigurationError: One is not a recipient, or a file has none.
    """
    found: list[str] = []
    for word in words:
        if word.startswith(RECIPIENT):
            found.append(word)
        else:
            listed = [line for line in _lines(Path(word)) if line.startswith(RECIPIENT)]
            if not listed:
                raise ConfigurationError(f"{word} holds no recipient", hint=HOW)
            found += listed
    for each in found:
        public_bytes(each)
    return tuple(dict.fromkeys(found))


def read_identities(path: str | os.PathLike[str]) -> tuple[Identity, ...]:
    """Return the identities in a file, one on a line: at least one.

    Raises:
        ConfigurationError: It is missing, unreadable, or has none.
    """
    lines = [line for line in _lines(Path(path)) if line.startswith(IDENTITY)]
    if not lines:
        raise ConfigurationError(f"{path} holds no identity", hint=HOW)
    try:
        return tuple(Identity.of(_from_text(IDENTITY, line)) for line in dict.fromkeys(lines))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error.message}", hint=error.hint) from None


def write_identity(path: str | os.PathLike[str], identity: Identity) -> None:
    """Write an identity to a new file readable only by its user.

    Raises:
        ConfigurationError: The file exists already, or cannot be written.
    """
    text = (
        "# trainckpt identity. Its holder reads what is encrypted to\n"
        f"# {identity.recipient}\n{to_text(IDENTITY, identity.secret)}\n"
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise ConfigurationError(
            f"{path} is there already", hint="name another file: what it may open would be lost"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}", hint=HOW) from None
    return [line.strip() for line in text.splitlines()]


INSTALL = "pip install 'trainckpt[crypto]'"


def must_be_there() -> None:
    """Raise `ConfigurationError` unless `cryptography` is installed."""
    if find_spec("cryptography") is None:
        raise ConfigurationError(
            "encryption needs the package cryptography, which is not installed", hint=INSTALL
        )


def derive(secret: bytes, info: bytes, salt: bytes | None = None) -> bytes:
    """Return 32 bytes derived from a secret one-way: HKDF-SHA256."""
    must_be_there()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt, info).derive(secret)


def cipher(secret: bytes, info: bytes, salt: bytes | None = None) -> AESGCM:
    """Return AES-256-GCM with a derived key."""
    key = derive(secret, info, salt)
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


# ---- snapshot keys: derived one by one, wrapped for each recipient
#
#     ratchet      the ranks of an attempt share one secret, sent once. Each save derives its key
#                  from it and advances the ratchet. Earlier keys cannot be recovered from the rest,
#                  so an intruder in the trainer cannot read earlier snapshots
#     snapshot     the manifest has its key, wrapped for each recipient; it encrypts no file
#     file         its key derives from the snapshot's, the file's name and 24 random bytes in the
#                  file: a new one for each encryption. So a number serves as nonce
#
# Wrapping: an ephemeral X25519 key, HKDF-SHA256 of the shared secret, AES-256-GCM. It does not
# authenticate the sender: anyone with a recipient's public key can encrypt to it.


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

    theirs, ours = public_bytes(recipient), X25519PrivateKey.generate()
    public = ours.public_key().public_bytes_raw()
    shared = ours.exchange(X25519PublicKey.from_public_bytes(theirs))
    wrapping_cipher = cipher(shared, b"trainckpt/wrap", public + theirs)
    return Wrapped(recipient, public + wrapping_cipher.encrypt(NO_NONCE, key, context.encode()))


def unwrap(wrapped: Wrapped, identity: Identity, context: str) -> bytes:
    """Return the key inside.

    Raises:
        UnusableSnapshot: It was changed, or wrapped for another recipient or context.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    public, sealed = wrapped.key[:KEY_BYTES], wrapped.key[KEY_BYTES:]
    try:
        ours = X25519PrivateKey.from_private_bytes(identity.secret)
        shared = ours.exchange(X25519PublicKey.from_public_bytes(public))
        theirs = public_bytes(identity.recipient)
        opening = cipher(shared, b"trainckpt/wrap", public + theirs)
        key = opening.decrypt(NO_NONCE, sealed, context.encode())
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
        "a file may hold several; the holder of one can let others in: trainckpt rewrap",
    )


def hide(key: bytes, data: bytes) -> bytes:
    """Encrypt data with a key derived from a snapshot's."""
    salt = os.urandom(SALT_BYTES)
    return salt + cipher(key, b"trainckpt/note", salt).encrypt(NO_NONCE, data, None)


def show(key: bytes, hidden: bytes, what: str) -> bytes:
    """Decrypt data encrypted by `hide`.

    Raises:
        UnusableSnapshot: It was changed; the message names `what`.
    """
    from cryptography.exceptions import InvalidTag

    salt, sealed = hidden[:SALT_BYTES], hidden[SALT_BYTES:]
    try:
        return cipher(key, b"trainckpt/note", salt).decrypt(NO_NONCE, sealed, None)
    except (InvalidTag, ValueError):
        raise UnusableSnapshot(f"{what} was changed") from None
