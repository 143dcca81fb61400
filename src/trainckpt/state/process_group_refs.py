"""Find the references to process groups in this process, to remove and restore them.

Known owners are plain DDP (the module and its reducer), SyncBatchNorm, FSDP2 (its mesh infos) and
DeviceMesh. Default arguments of torch's own functions are known too, in modules imported after a
group was made. Only these references are replaced; DDP's reducer keeps its buckets and their order.
Any other owner would go on with a destroyed group, so it is searched for and named: FSDP1, a
communication hook, the script's own variables.

Python's garbage collector does not list dictionaries and tuples of groups and names alone, since
they cannot be part of a cycle. So the referents of every listed object are searched too. Nor does
it list the variables of running functions: those are searched frame by frame. Last, the reference
counts must not exceed the references found.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trainckpt.ranks import process_groups

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

OURS, TORCH = "trainckpt.", "torch."
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_common"
MESH_INFO_NAMES = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")
MOST_NAMED, AT_ONCE = 5, 2000
UNFROZEN = "gc.unfreeze()"


@dataclass(frozen=True)
class GroupReference:
    """One reference to a group.

    Attributes:
        owner, name: Attribute of an object, key of a dictionary, or number of a default argument.
        number: Index of the group.
    """

    owner: Any
    name: str
    number: int

    def fill(self, group: Any) -> None:
        """Set the reference to another group."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = group
            return
        if isinstance(self.owner, FunctionType):
            defaults = list(self.owner.__defaults__ or ())
            defaults[int(self.name)] = group
            self.owner.__defaults__ = tuple(defaults)
            return
        setattr(self.owner, self.name, group)
        reducer = getattr(self.owner, "reducer", None)
        if isinstance(self.owner, DistributedDataParallel) and reducer is not None:
            reducer._update_process_group(group)  # no more: its buckets and their order stay


def slots(groups: Sequence[Any]) -> list[GroupReference]:
    """Return the references of known owners to these groups."""
    numbers = {id(group): number for number, group in enumerate(groups)}
    found = []
    for owner, names in _places(_objects()):
        for name in names:
            held = _held(owner, name)
            if id(held) in numbers:
                found.append(GroupReference(owner, name, numbers[id(held)]))
    return found


def _held(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(name)
    if isinstance(owner, FunctionType):
        return (owner.__defaults__ or ())[int(name)]
    return getattr(owner, name, None)


def fill(slots: Iterable[GroupReference], groups: Sequence[Any]) -> None:
    """Set each reference to its group by index."""
    for slot in slots:
        slot.fill(groups[slot.number])


def why_not(groups: Sequence[Any]) -> str:
    """Return the reason why these groups cannot be removed, naming other owners; or ""."""
    if gc.get_freeze_count():
        return f"gc.freeze() hides what holds the process groups; call {UNFROZEN} in before_dump"
    gc.collect()
    objects = _objects()
    if any(_is_hooked(each) for each in objects if isinstance(each, DistributedDataParallel)):
        return "a DDP module has a communication hook, which may hold its process group"
    if any(isinstance(each, torch.cuda.CUDAGraph) for each in objects):
        return "there are CUDA graphs, which may hold communicators"
    owners = [owner for owner, _ in _places(objects)]
    if others := sorted(set(_others(groups, owners))):
        more = f", and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        return f"process groups are held by {', '.join(others[:MOST_NAMED])}{more}"
    if _are_more(groups, owners):
        return "process groups are held by something that Python does not show"
    return ""


def _objects() -> list[Any]:
    """Return the objects with possible references to groups or communicators.

    Types are checked by `issubclass`: `isinstance` would run code of lazy objects.
    """
    module = sys.modules.get(FSDP2)
    infos = [getattr(module, name, None) for name in ("FSDPMeshInfo", "DDPMeshInfo")]
    kinds = (
        DistributedDataParallel,
        nn.SyncBatchNorm,
        DeviceMesh,
        torch.cuda.CUDAGraph,
        FunctionType,
        *(kind for kind in infos if kind is not None),
    )
    is_one: dict[int, bool] = {}  # by type: there are far fewer of them than objects
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if id(kind) not in is_one:
            is_one[id(kind)] = issubclass(kind, kinds)
        if is_one[id(kind)]:
            found.append(each)
    return found


def _places(objects: Sequence[Any]) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield owners with their attributes, dictionary keys or argument numbers."""
    for each in objects:
        if isinstance(each, FunctionType):  # of a module imported after a group was made
            names = _of_defaults(each) if str(each.__module__).startswith(TORCH) else ()
            if names:
                yield each, names
        elif isinstance(each, (DistributedDataParallel, nn.SyncBatchNorm)):
            yield each, ("process_group",)
        elif isinstance(each, DeviceMesh):
            registry = vars(each).get("_pg_registry")  # torch 2.11 and later; before: names alone
            if isinstance(registry, dict):
                yield registry, tuple(registry)
        elif not isinstance(each, torch.cuda.CUDAGraph):
            yield each, MESH_INFO_NAMES


def _of_defaults(function: FunctionType) -> tuple[str, ...]:
    kind = torch.distributed.ProcessGroup
    return tuple(str(n) for n, each in enumerate(function.__defaults__ or ()) if type(each) is kind)


def _is_hooked(module: Any) -> bool:
    logged = module._get_ddp_logging_data() if module.logger is not None else {}
    return bool(getattr(module, "_comm_hooks", None) or logged.get("comm_hook"))


def _others(groups: Sequence[Any], owners: Sequence[Any]) -> Iterator[str]:
    """Yield descriptions of owners neither known nor part of torch.distributed."""
    wanted = {id(group) for group in groups}
    skipped = {id(each) for each in (groups, *process_groups.containers())}
    skipped |= {id(place) for owner in owners for place in _parts(owner)}
    objects = gc.get_objects()
    for at in range(0, len(objects), AT_ONCE):
        some = objects[at : at + AT_ONCE]
        if _hold(some, wanted, skipped):  # rare; this filter runs at C's speed
            some = [each for each in some if id(each) not in skipped]
            yield from (_named(each, wanted) for each in some if _hold([each], wanted, skipped))
    del objects, some
    yield from _variables(wanted)


def _are_more(groups: Sequence[Any], owners: Sequence[Any]) -> bool:
    """Return True if any group has more references than its known owners explain."""
    counts = _known_references({id(group) for group in groups}, owners)
    ours = 3  # in `groups`, in `group` below, and the call's own
    return any(sys.getrefcount(group) > counts[id(group)] + ours for group in groups)


def _known_references(wanted: set[int], owners: Sequence[Any]) -> Counter[int]:
    places = process_groups.containers()
    places += [place for owner in owners for place in _parts(owner)]
    each_once = {id(place): place for place in places}.values()
    return Counter(
        id(held) for place in each_once for held in gc.get_referents(place) if id(held) in wanted
    )


def _parts(owner: Any) -> list[Any]:
    """Return the parts of a known owner with references to groups."""
    return [owner, getattr(owner, "__dict__", owner), getattr(owner, "__defaults__", owner)]


def _hold(objects: Sequence[Any], wanted: set[int], skipped: Collection[int] = ()) -> bool:
    """Return True if any object refers to a group, directly or through unlisted containers."""
    while objects:
        held = gc.get_referents(*objects)
        if not wanted.isdisjoint(map(id, held)):
            return True
        hidden = (each for each in held if type(each) in (dict, tuple) and not gc.is_tracked(each))
        objects = [each for each in hidden if id(each) not in skipped]
    return False


def _variables(wanted: set[int]) -> Iterator[str]:
    """Yield the variables of running functions, on every thread."""
    for innermost in sys._current_frames().values():
        frame: Any = innermost
        while frame is not None:
            if not str(frame.f_globals.get("__name__", "")).startswith(OURS):
                yield from _of_frame(frame, wanted)
            frame = frame.f_back


def _of_frame(frame: Any, wanted: set[int]) -> Iterator[str]:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return  # a module: the collector lists its dictionary of variables
    variables = frame.f_locals
    for name, value in list(variables.items()):
        is_hidden = type(value) in (dict, tuple) and not gc.is_tracked(value)
        if id(value) in wanted or (is_hidden and _hold([value], wanted)):
            yield f"the variable {name} of {code.co_name} ({code.co_filename}:{frame.f_lineno})"
    if type(variables) is dict:
        variables.clear()  # a copy: it would keep references alive


def _named(each: Any, wanted: set[int]) -> str:
    if isinstance(each, dict):
        key = next((str(k) for k, v in each.items() if id(v) in wanted), "?")
        if "__name__" in each and "__spec__" in each:
            return f"the variable {key} of module {each['__name__']}"
        owner = next((o for o in gc.get_referrers(each) if _dictionary(o) is each), None)
        return f"a dict, as {key!r}" if owner is None else f"{_kind(owner)}.{key}"
    inside = chain((_dictionary(each) or {}).items())
    key = next((f".{k}" for k, v in inside if id(v) in wanted), "")
    return f"{_kind(each)}{key}"


def _kind(each: Any) -> str:
    if isinstance(each, FunctionType):
        return f"function {each.__module__}.{each.__qualname__}"
    return f"{type(each).__module__}.{type(each).__qualname__}".removeprefix("builtins.")


def _dictionary(each: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(each, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None
