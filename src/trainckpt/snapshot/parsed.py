"""Parsed: manifests that were parsed before, known by their bytes.

After each commit all manifests of a place are looked at. To parse them takes the interpreter from
training for milliseconds, each time the same; their bytes are read, and must be what they were.
Each is parsed once, this attempt's own too: what is written is believed only when it was read back,
for older snapshots are deleted then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.format import manifest as manifests
from trainckpt.format.digest import digest

if TYPE_CHECKING:
    from trainckpt.format.manifest import Manifest


class Parsed:
    """Manifests without their tensors, of which there are too many to be kept for nothing."""

    def __init__(self) -> None:
        self._before: dict[str, Manifest] = {}
        self._now: dict[str, Manifest] = {}

    def __call__(self, data: bytes, what: str) -> Manifest:
        """As `manifest.load`, but for the tensors."""
        key = digest(data)
        found = self._now.get(key) or self._before.get(key)
        if found is None:
            found = replace(manifests.load(data, what), tensors={})
        self._now[key] = found
        return found

    def forget(self) -> None:
        """What was not asked for since the last time."""
        self._before, self._now = self._now, {}
