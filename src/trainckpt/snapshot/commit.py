"""Commit: the one atomic act that makes a snapshot exist.

    1. shard files   every rank   in any order; nothing refers to them
    2. receipts      every rank   lengths and digests, after its file is on stable storage
    3. manifest      rank 0       written to a temporary name after all of 2, fsynced
    4. the commit    rank 0       the manifest is renamed into place, the folder fsynced

Older shard files that the new ones refer to were committed before, and are looked for again in 3.
A crash before 4 leaves garbage for `prune`, never half a snapshot; a crash after 4 loses nothing.
Folders carry attempt and sequence number, so no commit ever replaces another.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed
from trainckpt.format import manifest as manifests
from trainckpt.format import names

if TYPE_CHECKING:
    from trainckpt.format.manifest import Manifest
    from trainckpt.tiers.base import Tier


def commit(tier: Tier, manifest: Manifest) -> None:
    """Steps 3 and 4. When it returns the snapshot exists and survives a power cut.

    Raises:
        SaveFailed: a shard file is not there with its length, so nothing was committed.
    """
    folder = manifest.name.folder
    older = ((names.SNAPSHOTS, file) for file in manifest.reached)
    for place, file in chain(((folder, file) for file in manifest.files), older):
        size = tier.size(f"{place}/{file.name}")
        if size != file.num_bytes:
            raise SaveFailed(f"{place}/{file.name} is {size} bytes, {file.num_bytes} were written")
    tier.replace(f"{folder}/{names.MANIFEST}", manifests.dump(manifest))
