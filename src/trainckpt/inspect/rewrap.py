"""Replace the recipients of encrypted snapshots. No file's data is read or written.

    each snapshot    its key and those of the older ones it refers to are unwrapped, the manifest is
                     proven, the keys are wrapped for the new recipients
    each tier        gets the very same manifest, in one act: a reader sees it before or after

A former recipient with a copy of an old manifest can still read those snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.encryption import encrypted_file, keys
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST
from trainckpt.snapshot import catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.run_directory.run_tiers import RunTiers
    from trainckpt.snapshot.decrypting_tier import KeyRing


@dataclass(frozen=True)
class Rewrapped:
    """Result for one snapshot.

    Attributes:
        snapshot: Full name.
        tiers: Tiers with the replaced manifest.
        reason: Reason for leaving it as it is, else "".
    """

    snapshot: str
    tiers: tuple[str, ...]
    reason: str = ""


def rewrap(
    everywhere: RunTiers,
    names: Sequence[SnapshotName],
    recipients: Sequence[str],
    opener: KeyRing,
    progress: Callable[[], None] = lambda: None,
) -> list[Rewrapped]:
    """Let these recipients, and no others, read the snapshots.

    Raises:
        ConfigurationError: no identity, or one that cannot read them; nothing was changed of that
            snapshot, but maybe of those before it: it can be done again.
        TierUnavailable: a tier refused.
    """
    found = []
    for name in names:
        found.append(_one(everywhere, name, recipients, opener))
        progress()
    return found


def _one(
    everywhere: RunTiers, name: SnapshotName, recipients: Sequence[str], opener: KeyRing
) -> Rewrapped:
    done, reasons, data = list[str](), list[str](), b""
    told: Manifest | None = None
    for tier in everywhere.tiers:
        key = f"{name.folder}/{MANIFEST}"
        try:
            if tier.size(key) is None:
                continue
            manifest = catalog.load_manifest(tier, everywhere.run, name)
            if manifest.encryption is None:
                reasons.append("it is not encrypted")
                continue
            if told is None or manifests.bound(manifest) != manifests.bound(told):
                told, data = manifest, manifests.dump(_wrapped(manifest, recipients, opener))
        except UnusableSnapshot as error:
            reasons.append(f"{tier.name}: {error.message}")
            continue
        tier.replace(key, data)
        done.append(tier.name)
    return Rewrapped(str(name), tuple(done), "; ".join(dict.fromkeys(reasons)))


def _wrapped(manifest: Manifest, recipients: Sequence[str], opener: KeyRing) -> Manifest:
    """Return the same manifest, with its keys wrapped for these recipients."""
    assert manifest.encryption is not None
    secrets = {name: opener.key(manifest, name) for name in manifest.encryption.keys}
    encrypted_file.open_sealed(manifest, secrets[str(manifest.name)])
    wrapped = {
        name: keys.wrap_for_all(secret, recipients, manifest.run, name)
        for name, secret in secrets.items()
    }
    return replace(manifest, encryption=replace(manifest.encryption, keys=wrapped))
