"""Cache parsed manifests by the digest of their bytes.

Each commit is followed by a look at all manifests of the run directory. Parsing them takes the
interpreter from training for milliseconds, so each is parsed once. The bytes are still read every
time, this attempt's own manifests too: older snapshots are deleted on the strength of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.format import manifest as manifests
from trainckpt.format.digest import digest

if TYPE_CHECKING:
    from trainckpt.format.manifest import Manifest


class ManifestCache:
    """Manifests without their tensors, which would take too much memory."""

    def __init__(self) -> None:
        self._before: dict[str, Manifest] = {}
        self._now: dict[str, Manifest] = {}

    def __call__(self, data: bytes, what: str) -> Manifest:
        """Return the manifest as `manifest.load` does, with empty `tensors`."""
        key = digest(data)
        found = self._now.get(key) or self._before.get(key)
        if found is None:
            found = replace(manifests.load(data, what), tensors={})
        self._now[key] = found
        return found

    def forget(self) -> None:
        """Drop manifests not requested since the last call."""
        self._before, self._now = self._now, {}
