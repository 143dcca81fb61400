"""Contents: one snapshot's tensors, whole, one at a time, wherever they lie. On the CPU.

For what reads a snapshot without resuming it: `load`, `export`, `diff`. Every byte is verified as
it is read; only what is asked for is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.lifecycle.run.options import read_options
from trainckpt.snapshot.opened import Opened, Opener
from trainckpt.snapshot.restore import Reader
from trainckpt.state.captured import VALUES
from trainckpt.state.destination import Destination
from trainckpt.state.stored_values import parse_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from trainckpt.lifecycle.places.source import Source


class Contents:
    """Reads one snapshot.

    Attributes:
        source: The snapshot.
        manifest: Of it.
        reader: For those that want boxes.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        tier = Opened(source.tier, Opener(read_options({}).identity))
        self.manifest = tier.admit(source.manifest)
        self.reader = Reader(tier, self.manifest)
        self._owners: dict[str, dict[int, tuple[int, ...]]] | None = None

    @property
    def names(self) -> list[str]:
        """Of all tensors, sorted, without the values."""
        return sorted(name for name in self.manifest.tensors if name != VALUES)

    def read(self, name: str, rank: int = 0) -> torch.Tensor:
        """One whole tensor; where each rank has its own, that of `rank`."""
        wanted = {name: None}
        destination = Destination(wanted)
        self.reader.read(wanted, destination, donor=rank)
        return destination.finish({name: self.manifest.tensors[name].dtype})[name]

    def values(self, rank: int = 0) -> dict[str, Any]:
        """What a rank has that is no tensor: part of the state -> encoded values."""
        return parse_values(self.read(VALUES, rank))

    def owners(self, name: str) -> Mapping[int, tuple[int, ...]]:
        """Rank -> stored shape, of those that have their own; none if it is one for all."""
        if self.manifest.tensors[name].layout is not None:
            return {}
        if self._owners is None:
            self._owners = self._find_owners()
        return self._owners.get(name, {})

    def _find_owners(self) -> dict[str, dict[int, tuple[int, ...]]]:
        found: dict[str, dict[int, tuple[int, ...]]] = {}
        tensors = self.manifest.tensors
        for rank in range(self.manifest.world):
            for region in (place.region for place in self.reader.places(rank)):
                entry = tensors.get(region.tensor)
                if entry is not None and entry.layout is None:
                    found.setdefault(region.tensor, {})[rank] = region.shape
        return found


def models_in(values: dict[str, Any]) -> list[str]:
    """Names of the models of a snapshot."""
    return [
        name
        for name, tree in values.items()
        if isinstance(tree, dict) and tree.keys() >= {"tied", "extra"}
    ]
