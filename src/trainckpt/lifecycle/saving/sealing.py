"""Sealing: an attempt whose snapshots are encrypted, on one rank.

set up    rank 0 makes a secret and tells it to each rank, wrapped for a key that this rank has
          just made: whoever reads along in the store learns nothing
a save    takes its key from the chain, on every rank the same; it is gone with the save. What
          survivors save is one more, which may begin while another has not come to its end
commit    rank 0 wraps it for each recipient, and takes along the wrapped keys of older snapshots
          that are referred to: it has them as they stand in manifests, and cannot open them, so
          only those are that were wrapped for the same recipients
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from trainckpt.encryption import envelope, sealed_manifest
from trainckpt.encryption.keys import parse_recipients
from trainckpt.encryption.package import must_be_there
from trainckpt.errors import ConfigurationError
from trainckpt.format import strict
from trainckpt.format.encryption import from_text, to_text
from trainckpt.format.names import reached_file
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot.save_sealed import Seal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.encryption import Wrapped
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.run.options import Options
    from trainckpt.ranks.channel import Channel


class Sealing:
    """What a rank needs to encrypt. The saving thread, and that of survivors."""

    def __init__(self, recipients: tuple[str, ...], run: str, chain: envelope.Chain) -> None:
        self._recipients, self._run, self._chain = recipients, run, chain
        self._known: Mapping[str, tuple[Wrapped, ...]] = {}
        self._open: dict[int, Seal] = {}  # sequence number of a save -> what encrypts it
        self._taking = threading.Lock()

    @property
    def recipients(self) -> frozenset[str]:
        """Who will be able to read what is saved."""
        return frozenset(self._recipients)

    def begin_from(self, manifest: Manifest) -> None:
        """What the attempt began from may be referred to."""
        if manifest.encryption is not None:
            self._known = manifest.encryption.keys

    def begin(self, name: SnapshotName) -> Seal:
        """The key of the save that begins now; until it ends there is no other of it.

        Raises:
            ValueError: a later save has begun.
        """
        with self._taking:
            seal = Seal(self._run, self._chain.key(name.sequence))
            self._open[name.sequence] = seal
        return seal

    def end(self, name: SnapshotName) -> None:
        """The save is over."""
        with self._taking:
            self._open.pop(name.sequence, None)

    def hide(self, name: SnapshotName, value: Any) -> str:
        """What ranks tell each other of a save over a place where others may read along."""
        return to_text(envelope.hide(self._open[name.sequence].key, strict.canonical(value)))

    def shown(self, name: SnapshotName, text: str) -> Any:
        """The inverse of `hide`, on any rank that takes part in the save.

        Raises:
            UnusableSnapshot: it was changed.
        """
        what = f"what a rank told of {name}"
        data = envelope.show(self._open[name.sequence].key, from_text(text, what), what)
        return strict.parse(data, what, max_bytes=len(data))

    def manifest(self, manifest: Manifest) -> Manifest:
        """As it is to be committed. Rank 0, between `begin` and `end`."""
        own, key = str(manifest.name), self._open[manifest.name.sequence].key
        folders = {str(reached_file(file.name)[0]) for file in manifest.reached}
        keys = {name: self._known[name] for name in sorted(folders)}
        keys[own] = envelope.wrap_for_all(key, self._recipients, self._run, own)
        return sealed_manifest.seal(manifest, key, keys)

    def committed(self, manifest: Manifest) -> None:
        """The next save may refer to it, and to what it refers to."""
        self.begin_from(manifest)


def may_refer(sealing: Sealing | None, manifest: Manifest) -> bool:
    """Whether who reads what this attempt saves reads all of that snapshot too, and nobody else."""
    if sealing is None or manifest.encryption is None:
        return sealing is None and manifest.encryption is None
    to = [frozenset(each.to for each in wrapped) for wrapped in manifest.encryption.keys.values()]
    return all(each == sealing.recipients for each in to)


def check(options: Options) -> tuple[str, ...]:
    """The recipients; none: nothing is encrypted.

    Raises:
        ConfigurationError: one is none, or the package is missing.
    """
    if not options.encrypt_to:
        return ()
    must_be_there()
    return parse_recipients(options.encrypt_to)


def set_up(options: Options, channel: Channel, run: str) -> Sealing | None:
    """Share a secret with the other ranks. Every rank calls it, with the same options."""
    recipients = check(options)
    if not recipients:
        return None
    if channel.world.rank == 0:
        logger.info("what is saved is encrypted to %s", ", ".join(recipients))
    return Sealing(recipients, run, envelope.Chain(_shared_secret(channel)))


def _shared_secret(channel: Channel) -> bytes:
    secret = envelope.new_key()
    if channel.world.size == 1:
        return secret
    mine = envelope.Letter()
    addresses = channel.gather("sealing/addresses", mine.address, RANKS_TIMEOUT_S)
    letters = None
    if channel.world.rank == 0:
        letters = [to_text(envelope.wrap(secret, to, envelope.A_RANK).key) for to in addresses]
    told = channel.gather("sealing/letters", letters, RANKS_TIMEOUT_S)[0]
    return mine.read(from_text(told[channel.world.rank], "rank 0's letter"))


def must_say_so(manifest: Manifest, options: Options) -> None:
    """Refuse to go on in the clear from what is encrypted, unless somebody has said so.

    Nobody goes on encrypting to those that a manifest names either: whoever can write to the run's
    place could add himself.
    """
    if manifest.encryption is None or options.encrypt_to:
        return
    if options.origins.get("encrypt_to", "default") == "default":
        who = ",".join(each.to for each in manifest.encryption.keys[str(manifest.name)])
        raise ConfigurationError(
            f"{manifest.name} is encrypted, and encrypt_to does not say whether this attempt "
            "encrypts too",
            hint=f'encrypt_to="{who}" if these are yours, or encrypt_to="none"',
        )
    logger.warning("%s is encrypted; what is saved from now on is not", manifest.name)
