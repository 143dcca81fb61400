"""The package that does the work, an extra: imported when somebody encrypts, not before."""

from __future__ import annotations

from importlib.util import find_spec

from trainckpt.errors import ConfigurationError

INSTALL = "pip install 'trainckpt[crypto]'"


def must_be_there() -> None:
    """Raise `ConfigurationError` unless it is installed."""
    if find_spec("cryptography") is None:
        raise ConfigurationError(
            "encryption needs the package cryptography, which is not installed", hint=INSTALL
        )


def derive(secret: bytes, info: bytes, salt: bytes | None = None) -> bytes:
    """32 bytes that follow from a secret, and from which it cannot be found: HKDF-SHA256."""
    must_be_there()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt, info).derive(secret)
