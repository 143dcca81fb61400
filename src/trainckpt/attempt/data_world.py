"""The data world: the ranks that see different data, where not every rank does.

Under tensor, context or pipeline parallelism several ranks train the same samples. The script
gives a device mesh, and the names of its dimensions along which the data differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from trainckpt.errors import ConfigurationError


@dataclass(frozen=True)
class DataWorld:
    """Dimensions of a mesh along which ranks see different data, and their extents."""

    dims: tuple[str, ...]
    extents: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks that see different data."""
        return prod(self.extents)

    def check(self, name: str, loader: Any) -> None:
        """Refuse a loader whose sampler divides the data among another number of ranks."""
        samplers = (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        )
        for replicas in (getattr(sampler, "num_replicas", None) for sampler in samplers):
            if replicas is not None and replicas != self.size:
                raise ConfigurationError(
                    f"{name} deals its data to {replicas} ranks, but data_dims={self.dims} says "
                    f"that {self.size} see different data",
                    hint=f"make its sampler with num_replicas={self.size} and the rank in those "
                    "dimensions",
                )

    def __str__(self) -> str:
        return f"{self.size} data-parallel ranks ({', '.join(self.dims)})"


def pop_data_world(keywords: dict[str, Any]) -> DataWorld | None:
    """Take `mesh` and `data_dims` out of a Checkpointer's keywords; None where they are not there.

    Raises:
        ConfigurationError: one without the other, or a name that is none of the mesh's.
    """
    mesh, named = keywords.pop("mesh", None), keywords.pop("data_dims", None)
    if mesh is None and named is None:
        return None
    names = getattr(mesh, "mesh_dim_names", None)
    if mesh is None or named is None or not names:
        raise ConfigurationError(
            "mesh and data_dims belong together, and the mesh needs names for its dimensions",
            hint='mesh=init_device_mesh(..., mesh_dim_names=("dp", "tp")), data_dims=("dp",)',
        )
    dims = (named,) if isinstance(named, str) else tuple(named)
    unknown = [name for name in dims if name not in names]
    if unknown or len(set(dims)) != len(dims):
        raise ConfigurationError(
            f"data_dims={dims} are not dimensions of the mesh {tuple(names)}",
            hint="name each dimension along which ranks see different data once",
        )
    return DataWorld(dims, tuple(int(mesh.shape[names.index(name)]) for name in dims))
