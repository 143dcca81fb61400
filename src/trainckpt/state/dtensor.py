"""Describe the layout of a DTensor over the ranks, and rebuild DTensors from local parts.

Only the local part is stored. A `format.layout.Layout` gives its position in the whole tensor.
Some meshes and placements have no layout (a partial sum, ranks in no regular order): then each rank
stores its part as its own.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_SPELLED = re.compile(r"R|S(\d{1,3})(?:/(\d{1,9}))?|P([a-z]{1,9})")


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor. Imports nothing: before the script's import there is none."""
    if type(tensor) in PLAIN:
        return False
    return type(tensor).__name__ in ("DTensor", "Parameter", "Buffer") and hasattr(
        tensor, "device_mesh"
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, detached; the tensor itself, detached, if it is a plain one."""
    if is_sharded(tensor):
        with torch.no_grad():  # several times as quick as to detach the sharded tensor
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor.detach()


def training_device(tensor: torch.Tensor) -> torch.device:
    """Return the device of the computation; the mesh's if FSDP2 offloads the shard."""
    if is_sharded(tensor):
        kind: str = tensor.device_mesh.device_type  # type: ignore[attr-defined]
        if tensor.device.type != kind:
            return torch.device(kind)
    return tensor.device


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a DTensor over all ranks; None: no layout expresses it.

    A submesh counts as the whole of its root mesh: the other dimensions are assumed to be replicas.
    A later comparison of digests confirms or refutes it.
    """
    mesh: DeviceMesh = tensor.device_mesh  # type: ignore[attr-defined]
    found = _layout(mesh, tensor.placements)  # type: ignore[attr-defined]
    if found is None:
        return None
    rank = torch.distributed.get_rank()
    held = found.box(tuple(tensor.shape), found.coordinate(rank))
    return found if held.shape == tuple(local(tensor).shape) else None


def position_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what the layout and the description of a DTensor follow from.

    Placements are spelled: in some releases of torch unequal ones are called equal.
    """
    dt: Any = tensor
    spelled = tuple(map(_spell, dt.placements))
    return dt.device_mesh, spelled, dt.shape, dt.stride(), dt.requires_grad


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the JSON needed by `rebuild`, besides the local part."""
    dt: Any = tensor
    return {
        "mesh": mesh_key(dt.device_mesh),
        "placements": [_spell(p) for p in dt.placements],
        "shape": list(dt.shape),
        "stride": list(dt.stride()),
    }


def layout_said(described: dict[str, Any], mesh: DeviceMesh) -> Layout | None:
    """Return the layout of the DTensor described by `described` on this mesh."""
    return _layout(mesh, [_placement(text) for text in described["placements"]])


def replicate(whole: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return a DTensor replicated on every rank of the mesh of `pattern`."""
    from torch.distributed.tensor import Replicate

    mesh: Any = pattern.device_mesh  # type: ignore[attr-defined]
    return _from_local(whole, mesh, [Replicate()] * mesh.ndim, whole.shape, whole.stride())


def mesh_key(mesh: DeviceMesh) -> str:
    """Return a name of a mesh: equal for the same ranks in the same order, in any attempt."""
    return _mesh_key(mesh, torch.distributed.get_rank())


@lru_cache(maxsize=256)
def _mesh_key(mesh: DeviceMesh, _rank: int) -> str:
    # Meshes are equal on all ranks; the ranks of a part of a mesh are not.
    names = ",".join(mesh.mesh_dim_names or ())
    return f"{names} {list(mesh.shape)} {mesh.mesh.flatten().tolist()}"


def rebuild(held: torch.Tensor, mesh: DeviceMesh, described: dict[str, Any]) -> torch.Tensor:
    """Return the DTensor described by `describe`, with this local part, on an equal mesh."""
    return _from_local(
        held,
        mesh,
        [_placement(text) for text in described["placements"]],
        tuple(described["shape"]),
        tuple(described["stride"]),
    )


def like(held: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with this local part and the layout of `pattern`."""
    p: Any = pattern
    return _from_local(held, p.device_mesh, p.placements, tuple(p.shape), p.stride())


def _from_local(
    held: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    made: DTensor = DTensor.from_local(
        held, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
    return made


def _layout(mesh: DeviceMesh, placements: Any) -> Layout | None:
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    rank = torch.distributed.get_rank()
    return _found(mesh, root, tuple(map(_spell, placements)), rank)


@lru_cache(maxsize=256)  # called for every tensor of every save, and takes a millisecond
def _found(
    mesh: DeviceMesh, root: DeviceMesh, placements: tuple[str, ...], _rank: int
) -> Layout | None:
    dims: list[int | None] = []
    strided = []
    for m, text in enumerate(placements):
        spelled = _SPELLED.fullmatch(text)
        if spelled is None or spelled[3]:
            return None
        dims.append(int(spelled[1]) if spelled[1] else None)
        if spelled[2]:
            strided.append(m)
    # FSDP over tensor parallel: the strided dimension divides the parts left by those to its right.
    order = [m for m in range(len(dims)) if m not in strided] + strided[::-1]
    ranks = mesh.mesh
    names, all_names = mesh.mesh_dim_names, root.mesh_dim_names
    if root is not mesh and names and all_names and set(names) < set(all_names):
        at = [all_names.index(name) for name in names]
        rest = [m for m in range(root.ndim) if m not in at]
        ranks = root.mesh.permute([*rest, *at])
    elif root is not mesh:
        ranks = _with_the_rest(ranks, root.mesh)
    added = ranks.dim() - len(dims)
    dims = [*(None for _ in range(added)), *dims]
    order = [*range(added), *(m + added for m in order)]
    strides = _strides(ranks)
    if strides is None:
        return None
    base = int(ranks.flatten()[0])
    return Layout(tuple(ranks.shape), strides, base, tuple(dims), tuple(order))


def _with_the_rest(ranks: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return the root's ranks with the dimensions outside the mesh first.

    A dimension was flattened, for example. If the mesh is no such part of the root, return the
    mesh's own ranks.
    """
    places = torch.isin(root, ranks).nonzero()
    if len(places) != ranks.numel():
        return ranks
    rest = [m for m in range(root.dim()) if len(set(places[:, m].tolist())) == 1]
    inside = [m for m in range(root.dim()) if m not in rest]
    extents = [root.shape[m] for m in rest]
    if prod(extents) * ranks.numel() != root.numel():
        return ranks
    every = root.permute([*rest, *inside]).reshape(*extents, *ranks.shape)
    here = every[tuple(int(places[0, m]) for m in rest)]
    return every if torch.equal(here, ranks) else ranks


def _strides(ranks: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a regular array of ranks, or None."""
    flat = ranks.flatten()
    strides = []
    regular = torch.full(ranks.shape, int(flat[0]), device=ranks.device)
    for m, extent in enumerate(ranks.shape):
        step = ranks.select(m, 1).flatten()[0] - flat[0] if extent > 1 else 1
        strides.append(int(step))
        along = torch.arange(extent, device=ranks.device) * int(step)
        regular = regular + along.reshape([-1 if k == m else 1 for k in range(ranks.dim())])
    if min(strides) < 1 or not torch.equal(regular, ranks.long()):
        return None
    found = Layout(tuple(ranks.shape), tuple(strides), 0, (None,) * ranks.dim(), ())
    return tuple(strides) if found.is_a_mesh_of(int(flat[-1]) - int(flat[0]) + 1) else None


def _spell(placement: Any) -> str:
    kind = type(placement).__name__
    if kind == "Replicate":
        return "R"
    if kind == "_StridedShard":
        return f"S{placement.dim}/{placement.split_factor}"
    if kind == "Shard":
        return f"S{placement.dim}"
    return f"P{placement.reduce_op}" if kind == "Partial" else kind


def _placement(text: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    spelled = _SPELLED.fullmatch(text) if isinstance(text, str) else None
    if spelled is None:
        raise UnusableSnapshot(f"a stored tensor lies over its mesh as {str(text)[:60]!r}")
    if spelled[3]:
        return Partial(spelled[3])
    if spelled[1] is None:
        return Replicate()
    dim = int(spelled[1])
    return _StridedShard(dim, split_factor=int(spelled[2])) if spelled[2] else Shard(dim)
