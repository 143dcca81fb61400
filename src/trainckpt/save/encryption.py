"""Encryption of an attempt's snapshots, on one rank.

set up    rank 0 makes a secret and sends it to each rank, encrypted to a key that this rank has
          just made: a reader of the store learns nothing
a save    takes its key from the ratchet, the same on every rank; it is dropped with the save. A
          survivor save is one more, which may begin before another has ended
commit    rank 0 encrypts the key to each recipient. It copies the encrypted keys of referenced
          older snapshots from their manifests, since it cannot decrypt them. So only snapshots
          with the same recipients are referenced
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.encryption import encrypted_file, keys
from trainckpt.encryption.keys import must_be_there, parse_recipients
from trainckpt.errors import ConfigurationError
from trainckpt.format import json_io
from trainckpt.format.manifest import Wrapped, from_text, to_text
from trainckpt.format.names import reached_file
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.snapshot.encrypted_writer import SnapshotKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.attempt.options import Options
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore


class SnapshotEncryption:
    """Keys and recipients of one rank. Used by the saving thread, and by that of survivors."""

    def __init__(self, recipients: tuple[str, ...], run: str, chain: keys.KeyRatchet) -> None:
        self._recipients, self._run, self._ratchet = recipients, run, chain
        self._known: Mapping[str, tuple[Wrapped, ...]] = {}
        self._open: dict[int, SnapshotKey] = {}  # sequence number of a save -> its key
        self._lock = threading.Lock()

    @property
    def recipients(self) -> frozenset[str]:
        """Recipients that can read the snapshots."""
        return frozenset(self._recipients)

    def allow_references(self, manifest: Manifest) -> None:
        """Allow the next save to refer to this snapshot, and to those it refers to.

        It is the newest commit, or the snapshot from which the attempt began.
        """
        if manifest.encryption is not None:
            self._known = manifest.encryption.keys

    def begin(self, name: SnapshotName) -> SnapshotKey:
        """Return the key of the save that begins now; it is the only one until the save ends.

        Raises:
            ValueError: a later save has begun.
        """
        with self._lock:
            snapshot_key = SnapshotKey(self._run, self._ratchet.key(name.sequence))
            self._open[name.sequence] = snapshot_key
        return snapshot_key

    def end(self, name: SnapshotName) -> None:
        """Drop the key of a save that is over."""
        with self._lock:
            self._open.pop(name.sequence, None)

    def encrypt_message(self, name: SnapshotName, value: Any) -> str:
        """Encrypt a message between ranks about a save, for a location that others may read."""
        return to_text(keys.hide(self._open[name.sequence].key, json_io.canonical(value)))

    def decrypt_message(self, name: SnapshotName, text: str) -> Any:
        """Decrypt the text of `hide`, on any rank that takes part in the save.

        Raises:
            UnusableSnapshot: the text was changed.
        """
        what = f"a rank's encrypted report on {name}"
        data = keys.show(self._open[name.sequence].key, from_text(text, what), what)
        return json_io.parse(data, what, max_bytes=len(data))

    def encrypt_manifest(self, manifest: Manifest) -> Manifest:
        """Return the manifest encrypted for its commit. Rank 0, between `begin` and `end`."""
        own, key = str(manifest.name), self._open[manifest.name.sequence].key
        folders = {str(reached_file(file.name)[0]) for file in manifest.reached}
        wrapped = {name: self._known[name] for name in sorted(folders)}
        wrapped[own] = keys.wrap_for_all(key, self._recipients, self._run, own)
        return encrypted_file.encrypt_manifest(manifest, key, wrapped)


def may_refer(own: SnapshotEncryption | None, manifest: Manifest) -> bool:
    """Return True if exactly the readers of this attempt's saves can read all of that snapshot."""
    if own is None or manifest.encryption is None:
        return own is None and manifest.encryption is None
    to = [frozenset(each.to for each in wrapped) for wrapped in manifest.encryption.keys.values()]
    return all(each == own.recipients for each in to)


def check(options: Options) -> tuple[str, ...]:
    """Return the recipients; empty if nothing is encrypted.

    Raises:
        ConfigurationError: a recipient is invalid, or the package is missing.
    """
    if not options.encrypt_to:
        return ()
    must_be_there()
    return parse_recipients(options.encrypt_to)


def set_up(options: Options, channel: RankStore, run: str) -> SnapshotEncryption | None:
    """Share a secret with the other ranks. Every rank calls it, with the same options."""
    recipients = check(options)
    if not recipients:
        return None
    if channel.world.rank == 0:
        logger.info("snapshots are encrypted to %s", ", ".join(recipients))
    return SnapshotEncryption(recipients, run, keys.KeyRatchet(_shared_secret(channel)))


def _shared_secret(channel: RankStore) -> bytes:
    secret = keys.new_key()
    if channel.world.size == 1:
        return secret
    own = keys.generate()
    addresses = channel.gather("sealing/addresses", own.recipient, RANKS_TIMEOUT_S)
    letters = None
    if channel.world.rank == 0:
        letters = [to_text(keys.wrap(secret, to, keys.A_RANK).key) for to in addresses]
    received = channel.gather("sealing/letters", letters, RANKS_TIMEOUT_S)[0]
    letter = from_text(received[channel.world.rank], "rank 0's secret")
    return keys.unwrap(Wrapped(own.recipient, letter), own, keys.A_RANK)


def check_stays_encrypted(manifest: Manifest, options: Options) -> None:
    """Refuse to continue an encrypted run in the clear, unless `encrypt_to` says so.

    The recipients of the manifest are not taken over: anyone with write access to the run directory
    could add a recipient.
    """
    if manifest.encryption is None or options.encrypt_to:
        return
    if options.origins.get("encrypt_to", "default") == "default":
        recipients = ",".join(each.to for each in manifest.encryption.keys[str(manifest.name)])
        raise ConfigurationError(
            f"{manifest.name} is encrypted, and encrypt_to is not set for this attempt",
            hint=f'encrypt_to="{recipients}" if these recipients are yours, or encrypt_to="none"',
        )
    logger.warning('%s is encrypted; the next snapshots are not (encrypt_to="none")', manifest.name)
