"""Destroy the process groups of torch.distributed for a while, and make them again as they were.

An NCCL communicator cannot be in a dump: NVIDIA's driver hangs on one, or ends the process. So
around a dump there is none:

    specs        read the settings of this rank's groups, in the order of their creation
    tear_down    destroys all; from now on there is no default group
    make         the same groups again: names, ranks, backends, time limits, options, numbering
    agree        one collective on the new default group: all ranks are there, at the same place

The store stays: its connections lie within the dumped process tree. The new groups find each other
below a fresh prefix, since the old NCCL and gloo keys are still in the store.

Subgroups of a default group bound to a device were split from it. Each new one is made by its own
members alone; the membership is the same.

Private names of torch are used here; `why_not` names a missing one.
Threads: the training's.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import NoAgreement

if TYPE_CHECKING:
    from collections.abc import Sequence

KNOWN = frozenset({"gloo", "nccl"})  # backends that can be made again
TAKEN_DOWN = {"nccl"}  # backends with groups that cannot be in a dump
USER_TAG, PREFIX = "user:", "trainckpt/groups"
WORLD_NAMES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "group_count",
    "default_pg",
)
MODULE_NAMES = ("_new_process_group_helper", "_update_default_pg", "_get_default_store")
HELPER_NAMES = ("timeout", "pg_tag", "group_desc", "device_id")
SYMMETRIC, WORKSPACES = "torch.distributed._symmetric_memory", "_group_name_to_workspace_tensor"


@dataclass(frozen=True)
class Spec:
    """Settings of one group.

    Attributes:
        name: Ours and torch's, the same on all its members.
        ranks: World ranks, in the group's own order.
        member: This rank's index in the group.
        backend: As given: "nccl", "cpu:gloo,cuda:nccl", "undefined".
        timeout: Time limit of its collectives.
        description, tag: As given; None: no tag.
        device: Device it is bound to, or None.
        is_default: True for the group of all ranks.
        options: Options of NCCL, or None.
    """

    name: str
    ranks: tuple[int, ...]
    member: int
    backend: str
    timeout: timedelta
    description: str
    tag: str | None
    device: torch.device | None
    is_default: bool
    options: Any = None


@dataclass(frozen=True)
class DestroyedGroups:
    """Input of `make`: the specs, the remaining store, and torch's group counter."""

    specs: tuple[Spec, ...]
    store: Any
    count: int


def must_be_torn_down() -> bool:
    """Return True if a group of this process cannot be in a dump."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if not all(hasattr(_c10d()._world, name) for name in WORLD_NAMES):
        return str(torch.distributed.get_backend()) in TAKEN_DOWN  # `why_not` gives the details
    return any(TAKEN_DOWN & _backends(group) for group in groups())


def groups() -> list[Any]:
    """Return every group with this rank in it, in the order of creation."""
    return list(_c10d()._world.pg_map)


def containers() -> list[Any]:
    """Return torch.distributed's own references to groups, all of which `tear_down` empties."""
    c10d = _c10d()
    world = c10d._world
    found = [vars(c10d), world, vars(world)]
    found += [
        each
        for part in (vars(c10d), vars(world))
        for each in part.values()
        if issubclass(type(each), dict)
    ]
    return found + list(world.tags_to_pg.values())


def why_not() -> str:
    """Return why the groups cannot be destroyed and made again, or ""."""
    c10d: Any = _c10d()
    missing = [f"_World.{name}" for name in WORLD_NAMES if not hasattr(c10d._world, name)]
    missing += [name for name in MODULE_NAMES if not hasattr(c10d, name)]
    if not missing:
        known = inspect.signature(c10d._new_process_group_helper).parameters
        missing += [name for name in HELPER_NAMES if name not in known]
    if missing:
        return f"torch {torch.__version__} no longer has {', '.join(missing)}"
    for group in groups():
        name = c10d._world.pg_names[group]
        if type(group) is not torch.distributed.ProcessGroup:
            return f"process group {name} is a {type(group).__module__}.{type(group).__qualname__}"
        if other := sorted(_backends(group) - KNOWN):
            return f"process group {name} has the backend {other[0]}, which is not known here"
        if c10d._world.pg_coalesce_state.get(group):
            return f"process group {name} holds collectives back"
    if getattr(sys.modules.get(SYMMETRIC), WORKSPACES, None):
        return "there is symmetric memory, which ranks map from each other"
    return "" if not getattr(c10d._world, "comms", None) else "torchcomms made its groups"


def specs() -> tuple[Spec, ...]:
    """Return the settings of every group with this rank in it, in the order of creation."""
    return tuple(_spec(group) for group in groups())


def placeholder() -> Any:
    """Return a group of this process alone, without a backend, a thread or a connection."""
    distributed: Any = torch.distributed
    return distributed.ProcessGroup(distributed.HashStore(), 0, 1)


def noted() -> DestroyedGroups:
    """Return the data needed to make all groups again."""
    c10d = _c10d()
    return DestroyedGroups(specs(), c10d._get_default_store(), c10d._world.group_count)


def tear_down() -> None:
    """Destroy all groups. Every rank calls it, with no collective under way."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


def make(torn: DestroyedGroups, time: int) -> list[Any]:
    """Make the groups again, in the order of `torn.specs`. Every rank.

    Args:
        torn: From `noted`.
        time: Number of this call in the process: its keys are apart from earlier ones.
    """
    distributed: Any = torch.distributed
    c10d = _c10d()
    found = []
    for spec in torn.specs:
        ranks = "-".join(map(str, spec.ranks))  # groups of other ranks may bear the same name
        store = distributed.PrefixStore(f"{PREFIX}/{time}/{spec.name}/{ranks}", torn.store)
        found.append(_make(spec, store))
    for spec, group in zip(torn.specs, found, strict=True):
        group.bound_device_id = spec.device
    c10d._world.group_count = torn.count
    return found


def agree(place: Sequence[int], within_s: float) -> None:
    """Return once all ranks have come, at the same place. Collective.

    Raises:
        NoAgreement: some rank did not come, or is elsewhere.
    """
    distributed: Any = torch.distributed
    world = _c10d()._world.default_pg
    mine = torch.tensor(list(place), dtype=torch.int64, device=_device(world))
    all_of_them = [torch.zeros_like(mine) for _ in range(world.size())]
    try:
        work = distributed.all_gather(all_of_them, mine, async_op=True)
        work.wait(timedelta(seconds=within_s))
        found = [each.tolist() for each in all_of_them]
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise NoAgreement(f"the process groups do not work any more ({first_line})") from error
    if any(each != list(place) for each in found):
        raise NoAgreement(f"the ranks are at different places: {found}")


def _make(spec: Spec, store: Any) -> Any:
    c10d = _c10d()
    parameters = inspect.signature(c10d._new_process_group_helper).parameters
    options = "backend_options" if "backend_options" in parameters else "pg_options"
    group, _ = c10d._new_process_group_helper(
        len(spec.ranks),
        spec.member,
        [] if spec.is_default else list(spec.ranks),
        c10d.Backend(spec.backend),
        store,
        spec.name,
        timeout=spec.timeout,
        pg_tag=spec.tag,
        device_id=spec.device,
        group_desc=spec.description,
        **{options: spec.options},
    )
    if spec.is_default:
        c10d._update_default_pg(group)
        group.bound_device_id = None  # else later groups would be split from it
    c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(spec.ranks)}
    return group


def _spec(group: Any) -> Spec:
    world = _c10d()._world
    tag = world.pg_to_tag.get(group) or ""
    backends = [_unwrapped(group._get_backend(device)) for device in group._device_types]
    return Spec(
        name=str(world.pg_names[group]),
        ranks=tuple(world.pg_group_ranks[group]),
        member=int(group.rank()),
        backend=str(world.pg_map[group][0]),
        timeout=next(backend.options._timeout for backend in backends),
        description=str(group.group_desc),
        tag=tag.removeprefix(USER_TAG) if tag.startswith(USER_TAG) else None,
        device=group.bound_device_id,
        is_default=group is world.default_pg,
        options=next((_options(b) for b in backends if _is_nccl(b)), None),
    )


def _backends(group: Any) -> set[str]:
    """Return the names of its backends, as in "cpu:gloo,cuda:nccl"."""
    config = str(_c10d()._world.pg_backend_config[group])
    return {part.rpartition(":")[2] for part in config.split(",")}


def _unwrapped(backend: Any) -> Any:
    """Return the backend inside the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def _is_nccl(backend: Any) -> bool:
    kind = getattr(torch.distributed, "ProcessGroupNCCL", None)
    return kind is not None and isinstance(backend, kind)


def _options(backend: Any) -> Any:
    """Copy the NCCL options: the old object may hold the backend that this one was split from."""
    distributed: Any = torch.distributed
    found = distributed.ProcessGroupNCCL.Options()
    old = backend.options
    found.is_high_priority_stream = old.is_high_priority_stream
    if hasattr(old, "config"):
        found.config = old.config
    return found


def _device(group: Any) -> torch.device:
    """Return the device for this group's collectives."""
    kinds = {device.type for device in group._device_types}
    if "cuda" in kinds and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d
