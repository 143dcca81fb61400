"""Read one snapshot's tensors, whole, one at a time, from any tier. On the CPU.

For reading a snapshot without resuming it: `load`, `export`, `diff`. Every byte is verified as it
is read; only the requested tensors are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.attempt.options import read_options
from trainckpt.snapshot.decrypting_tier import DecryptingTier, KeyRing
from trainckpt.snapshot.restore import Reader
from trainckpt.state.captured import VALUES, parse_values
from trainckpt.state.destination import Destination

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from trainckpt.format.layout import Box
    from trainckpt.run_directory.run_tiers import SnapshotSource


class Contents:
    """Reader of one snapshot.

    Attributes:
        source: The snapshot.
        manifest: Its manifest.
        reader: For callers that read boxes.
    """

    def __init__(self, source: SnapshotSource) -> None:
        self.source = source
        tier = DecryptingTier(source.tier, KeyRing(read_options({}).identity))
        self.manifest = tier.admit(source.manifest)
        self.reader = Reader(tier, self.manifest)
        self._owners: dict[str, dict[int, tuple[int, ...]]] | None = None

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted, without the values."""
        return sorted(name for name in self.manifest.tensors if name != VALUES)

    def read(self, name: str, rank: int = 0) -> torch.Tensor:
        """Read one whole tensor; the one of `rank` if each rank has its own."""
        return self.read_boxes({name: None}, rank)[name]

    def read_boxes(self, wanted: Mapping[str, Box | None], rank: int) -> dict[str, torch.Tensor]:
        """Read these boxes of tensors, None: whole; those of `rank` if each rank has its own."""
        destination = Destination(wanted)
        self.reader.read(wanted, destination, donor=rank)
        return destination.finish({name: self.manifest.tensors[name].dtype for name in wanted})

    def values(self, rank: int = 0) -> dict[str, Any]:
        """Return a rank's state besides tensors: part of the state -> encoded values."""
        return parse_values(self.read(VALUES, rank))

    def owners(self, name: str) -> Mapping[int, tuple[int, ...]]:
        """Return rank -> stored shape if the ranks have their own tensors; empty if there is one
        for all."""
        if self.manifest.tensors[name].layout is not None:
            return {}
        if self._owners is None:
            self._owners = {}
            for rank in range(self.manifest.world):
                for region in (place.region for place in self.reader.places(rank)):
                    entry = self.manifest.tensors.get(region.tensor)
                    if entry is not None and entry.layout is None:
                        self._owners.setdefault(region.tensor, {})[rank] = region.shape
        return self._owners.get(name, {})


def models_in(values: Mapping[str, Any]) -> list[str]:
    """Return the names of a snapshot's models."""
    return [
        name
        for name, tree in values.items()
        if isinstance(tree, dict) and tree.keys() >= {"tied", "extra"}
    ]


def with_tied(names: Iterable[str], values: Mapping[str, Any]) -> dict[str, str]:
    """Return every full name of these tensors -> its tensor; a tied tensor has several."""
    known = {name: name for name in names}
    for model in models_in(values):
        for tied in (values[model]["tied"], values[model].get("tied buffers", {})):
            for other, name in tied.items():
                if f"{model}/{name}" in known:
                    known[f"{model}/{other}"] = f"{model}/{name}"
    return known
