"""rewrap: change the recipients of encrypted checkpoints, without rewriting their data.

    each snapshot    its key and those of the older ones it refers to are unwrapped, the manifest is
                     proven, the keys are wrapped for the new recipients
    each tier        gets the very same manifest, in one act: a reader sees it before or after

A former recipient with a copy of an old manifest can still read those snapshots.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from trainckpt.attempt.options import read_options
from trainckpt.cli import output
from trainckpt.encryption import encrypted_file, keys
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST, split_target
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.snapshot import catalog
from trainckpt.snapshot.decrypting_tier import KeyRing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.run_directory.run_tiers import RunTiers


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("target", metavar="RUN[@SNAPSHOT]", help="default: all snapshots")
    parser.add_argument(
        "--to",
        metavar="RECIPIENTS",
        required=True,
        help="all future readers: recipients, or files of recipients, with commas",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Wrap the keys anew, in every tier that answers; 65 if any manifest is bad."""
    recipients = keys.parse_recipients(word.strip() for word in arguments.to.split(","))
    run, snapshot = split_target(arguments.target)
    everywhere = open_everywhere(run)
    candidates = everywhere.candidates()
    chosen = (
        (catalog.find(candidates, snapshot, everywhere.run_tier.url),) if snapshot else candidates
    )
    committed = [c for c in chosen if c.reason != catalog.NOT_COMMITTED]
    names = [c.name for c in committed if c.manifest is None or c.manifest.encryption is not None]
    opener = KeyRing(read_options({}).identity)
    rewrapped = [_rewrap(everywhere, name, recipients, opener) for name in names]
    if arguments.json:
        rows = [asdict(result) for result in rewrapped]
        document = {
            "run": everywhere.run_tier.url,
            "recipients": list(recipients),
            "snapshots": rows,
        }
        output.document({**document, "silent": dict(everywhere.silent)})
    else:
        for result in rewrapped:
            print(f"{result.snapshot}: {', '.join(result.tiers) or 'nowhere'}", result.reason)
        count = sum(bool(result.tiers) for result in rewrapped)
        print(f"{count} snapshots, for {', '.join(recipients)}")
        for tier, reason in everywhere.silent.items():
            print(f"unchanged in {tier}, no answer: {reason}")
    if any(result.reason for result in rewrapped):
        return UnusableSnapshot.exit_code
    return TierUnavailable.exit_code if everywhere.silent else 0


def _rewrap(
    everywhere: RunTiers, name: SnapshotName, recipients: Sequence[str], opener: KeyRing
) -> Rewrapped:
    """Let these recipients, and no others, read the snapshot.

    Raises:
        ConfigurationError: no identity, or one that cannot read it; it was not changed.
        TierUnavailable: a tier refused.
    """
    done, reasons, data = list[str](), list[str](), b""
    first: Manifest | None = None
    key = f"{name.folder}/{MANIFEST}"
    for tier in everywhere.tiers:
        try:
            if tier.size(key) is None:
                continue
            manifest = catalog.load_manifest(tier, everywhere.run, name)
            if manifest.encryption is None:
                reasons.append("it is not encrypted")
                continue
            if first is None or manifests.bound(manifest) != manifests.bound(first):
                first, data = manifest, manifests.dump(_wrapped(manifest, recipients, opener))
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
    encrypted_file.decrypt_manifest(manifest, secrets[str(manifest.name)])
    wrapped = {
        name: keys.wrap_for_all(secret, recipients, manifest.run, name)
        for name, secret in secrets.items()
    }
    return replace(manifest, encryption=replace(manifest.encryption, keys=wrapped))
