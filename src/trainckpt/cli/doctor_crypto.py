"""doctor: whether checkpoints can be encrypted here, how fast, and what the options name for it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.cli import show
from trainckpt.encryption.keys import parse_recipients, read_identities
from trainckpt.encryption.package import INSTALL, must_be_there
from trainckpt.encryption.sealed_file import bytes_per_s
from trainckpt.errors import ConfigurationError
from trainckpt.lifecycle.run.machine import Item
from trainckpt.lifecycle.run.options import read_options

if TYPE_CHECKING:
    from trainckpt.lifecycle.run.options import Options

NAME = "encryption"


def examine() -> list[Item]:
    """A run does without, unless its options ask for it."""
    try:
        options = read_options({})
    except ConfigurationError:  # `trainckpt config` says which
        return [_package(needed=False)]
    wanted = bool(options.encrypt_to or options.identity)
    found = [_package(needed=wanted)]
    if found[0].ok:
        found += _recipients(options) + _identity(options)
    return found


def _package(*, needed: bool) -> Item:
    try:
        must_be_there()
    except ConfigurationError:
        what = "the package cryptography is not installed"
        return Item(NAME, ok=False, value=what, cure=INSTALL, needed=needed)
    version = metadata.version("cryptography")
    value = f"AES-256-GCM at {show.size(bytes_per_s())}/s a core, cryptography {version}"
    return Item(NAME, ok=True, value=value, needed=needed)


def _recipients(options: Options) -> list[Item]:
    if not options.encrypt_to:
        return []
    try:
        found = parse_recipients(options.encrypt_to)
    except ConfigurationError as error:
        return [Item("recipients", ok=False, value=error.message, cure=error.hint)]
    return [Item("recipients", ok=True, value=", ".join(found))]


def _identity(options: Options) -> list[Item]:
    """The file, who else can read it, and whether it is the private key of a recipient."""
    if options.identity is None:
        return []
    name, path = "identity", Path(options.identity)
    try:
        identities = read_identities(path)
        mode = path.stat().st_mode & 0o777
    except ConfigurationError as error:
        return [Item(name, ok=False, value=error.message, cure=error.hint)]
    except OSError as error:
        return [Item(name, ok=False, value=f"{path}: {error.strerror}", cure="name another file")]
    to = ", ".join(identity.recipient for identity in identities)
    value = f"{path} reads what is encrypted to {to}"
    if mode & 0o077:
        value = f"{path} can be read by others (mode {mode:04o})"
        return [Item(name, ok=False, value=value, cure=f"chmod 600 {path}")]
    return [Item(name, ok=True, value=value)]
