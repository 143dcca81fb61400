"""Rewrap: other recipients for what is encrypted already. No file's data is read or written.

    each snapshot    its key and those of the older ones it refers to are unwrapped, the manifest is
                     proven, the keys are wrapped for the new recipients
    each tier        gets the very same manifest, in one act: whoever reads sees it before or after

Whoever was a recipient and kept a copy of an old manifest can read those snapshots still.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.encryption import envelope, sealed_manifest
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST
from trainckpt.snapshot import catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.places.everywhere import Everywhere
    from trainckpt.snapshot.opened import Opener


@dataclass(frozen=True)
class Rewrapped:
    """What became of one snapshot.

    Attributes:
        snapshot: Full name.
        tiers: Where its manifest was replaced.
        reason: Why it was left as it is, else "".
    """

    snapshot: str
    tiers: tuple[str, ...]
    reason: str = ""


def rewrap(
    everywhere: Everywhere,
    names: Sequence[SnapshotName],
    recipients: Sequence[str],
    opener: Opener,
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
    everywhere: Everywhere, name: SnapshotName, recipients: Sequence[str], opener: Opener
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


def _wrapped(manifest: Manifest, recipients: Sequence[str], opener: Opener) -> Manifest:
    """The same manifest, with its keys wrapped for these."""
    assert manifest.encryption is not None
    secrets = {name: opener.key(manifest, name) for name in manifest.encryption.keys}
    sealed_manifest.open_sealed(manifest, secrets[str(manifest.name)])
    keys = {
        name: envelope.wrap_for_all(secret, recipients, manifest.run, name)
        for name, secret in secrets.items()
    }
    return replace(manifest, encryption=replace(manifest.encryption, keys=keys))
