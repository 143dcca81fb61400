"""Vouched: files that came into this host's memory verified, for those who read them there next.

    vouch    who has brought them, before a launch's ranks are there, leaves a note
    vouched  the ranks: which files need not be verified once more, and what tells that they are
             the same still

The note lies in the folder of that one launch, which is this user's alone. A file counts as long as
its stamp is the one that it had then (`tiers.held.stamp_of`).
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from trainckpt.tiers.held import NUM_STAMPS
from trainckpt.tiers.private import write_private

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainckpt.format.manifest import Manifest
    from trainckpt.tiers.held import Stamp

NOTE = "vouched.json"
MAX_BYTES = 16 << 20


def vouch(folder: Path, manifest: Manifest, stamps: Mapping[int, Stamp]) -> None:
    """Note which files of a snapshot were verified; who cannot write that has said nothing.

    Args:
        folder: Of the launch whose ranks will read them.
        manifest: Of the snapshot.
        stamps: Of the files in this host's memory, by their ranks.
    """
    noted = {_key(manifest, number): (manifest.files[number].content.header_digest, stamp)
             for number, stamp in stamps.items()}  # fmt: skip
    with contextlib.suppress(OSError):  # the launch may be over
        write_private(folder / NOTE, json.dumps(noted).encode())


def vouched(folder: Path, manifest: Manifest) -> dict[str, Stamp]:
    """The files of a snapshot that a launch has a note of, each with its stamp, by key.

    What is no such note says nothing.
    """
    try:
        with (folder / NOTE).open("rb") as file:
            noted = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    found = {}
    for number, entry in enumerate(manifest.files):
        key = _key(manifest, number)
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            header_digest, stamp = noted[key]
            if header_digest == entry.content.header_digest and len(stamp) == NUM_STAMPS:
                found[key] = tuple(map(int, stamp))
    return found


def _key(manifest: Manifest, number: int) -> str:
    return f"{manifest.name.folder}/{manifest.files[number].name}"
