"""Keep tensors in plain attributes of modules, optimizers and parameters, in no state_dict.

They are a hidden state carried from batch to batch, a moving average or random features in
`self.h`. A snapshot holds the tensors and NumPy arrays in attributes of the script's own modules
and optimizers, and of parameters, also those in short containers, and a resume sets
the attributes to them. A named tuple is made again by the class of that name in the attribute, or
in its owner's module. Only values without the graph that computed them are kept. Beyond
`MAX_BYTES`, the smallest first, a snapshot holds a sample of the elements, and a resume names an
attribute whose sample differs.

Left out are views of parameters and buffers. An attribute without a value is no difference: a
forward may make it again, as a cache.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import OrderedDict, deque
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainckpt.format import digest
from trainckpt.state import dtensor
from trainckpt.state.staging import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainckpt.state.captured import Captured, Saved
    from trainckpt.state.registry import Registry

PART = "plain tensors"  # no keyword can be spelled so
MAX_BYTES = 4 << 20
HINT = "register a buffer, or track it with trainckpt.Attributes"
_ITEMS = (256, 256)  # most items of a container, and of one in it
_SAMPLE = 4096  # most elements compared of a tensor that is not stored
_MUTABLE = (list, dict, OrderedDict, deque)
_CONTAINERS = (tuple, *_MUTABLE)
_TENSORS = (torch.Tensor, nn.Parameter)


class PlainTensors:
    """The tensors in plain attributes of modules and optimizers."""

    def __init__(
        self,
        owners: Iterable[tuple[str, Any, frozenset[str]]],
        parameters: Callable[[], Mapping[str, torch.Tensor]] = dict,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        """Note the tensors that are there.

        Args:
            owners: Name of each module and optimizer, itself, and the attributes to leave alone.
            parameters: Returns the present parameters by name.
            elsewhere: Attributes of parameters that are captured elsewhere.
        """
        self._elsewhere = elsewhere
        self._parameters = parameters
        self._owners = {
            name: (owner, skipped | {"state", "param_groups", "defaults"})
            if isinstance(owner, torch.optim.Optimizer)
            else (owner, skipped)
            for name, owner, skipped in owners
        }
        self._begun = {name: _reference(value) for name, value in self._values()}

    def capture(self, registry: Registry, out: Captured) -> None:
        """Add the values of the attributes, the smallest first, and samples of the others."""
        held = dict(self._values())
        if not held:
            return
        out.apart[PART] = 3
        known = _known(registry)
        entries: dict[str, Any] = {}
        first: dict[int, str] = {}
        room = MAX_BYTES
        for name, value in sorted(held.items(), key=lambda item: (_num_bytes(item[1]), item[0])):
            leaves = list(_leaves(value))
            if any(_address(leaf) in known for leaf in leaves):
                continue
            if (same := first.setdefault(id(value), name)) != name:
                entries[name] = {"same": same}
            elif type(value) in _CONTAINERS and len(value) > _ITEMS[0]:
                entries[name] = {"length": len(value)}
            elif (num_bytes := _num_bytes(value)) > room:
                entries[name] = {"sample": sample(leaves)}
            elif _is_storable(value):
                room -= num_bytes
                plain = tuple(value) if _is_named_tuple(value) else value
                entries[name] = {
                    "of": out.encode(plain, f"{PART}/{name}", PART),
                    "is_first": self._is_first(name, value),
                    "trained": [i for i, leaf in enumerate(leaves) if _is_trained(leaf)],
                }
                if plain is not value:
                    entries[name]["named"] = type(value).__qualname__
        if entries:
            out.values[PART] = entries

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each attribute with a tensor."""
        for prefix, (owner, skipped) in self._owners.items():
            for key, value in list(vars(owner).items()):
                if key not in skipped and next(_leaves(value), None) is not None:
                    yield f"{prefix}.{key}", value
        for name, parameter in self._parameters().items():
            for key, value in list(vars(parameter).items()):
                if key not in self._elsewhere and next(_leaves(value), None) is not None:
                    yield f"{name}.{key}", value

    def _is_first(self, name: str, value: Any) -> bool:
        """Return True if the attribute has held this very object since the run began."""
        first = self._begun.get(name)
        return value is (first() if isinstance(first, weakref.ref) else first)

    @torch.no_grad()
    def apply(self, registry: Registry, saved: Saved) -> None:
        """Set the attributes to the saved values.

        What an attribute has held since the run began is filled in place: others may refer to it.
        """
        put: dict[str, Any] = {}
        stored = saved.values.get(PART, {})
        for name in sorted(stored, key=lambda name: "same" in stored[name]):
            entry, place = stored[name], self._place(name)
            if place is None or not {"of", "same"} & entry.keys():
                continue
            owner, key = place
            live = vars(owner).get(key)
            if "same" in entry:
                found = put.get(entry["same"], live)
            else:
                own = owner.parameters() if isinstance(owner, nn.Module) else ()
                near = next(chain(own, registry.all_parameters()), None)
                found = saved.decode(entry["of"], None if near is None else near.device)
                for i, leaf in enumerate(_leaves(found)):
                    if i in entry["trained"]:
                        leaf.requires_grad_()
                if "named" in entry:
                    kind = _named_tuple(entry["named"], live, owner)
                    if kind is None or len(kind._fields) != len(found):
                        continue  # `differing` names it
                    found = kind._make(found)
                if entry["is_first"] and _fill(live, found):
                    found = live
                elif entry["is_first"]:
                    self._begun[name] = _reference(found)
            vars(owner)[key] = put[name] = found

    def _place(self, name: str) -> tuple[Any, str] | None:
        prefix, _, key = name.rpartition(".")
        owner, skipped = self._owners.get(prefix, (self._parameters().get(prefix), frozenset()))
        if owner is None or key in skipped:
            return None
        names = vars(owner)
        registered = (names.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
        return None if any(key in each for each in registered) else (owner, key)

    def differing(self, saved: Saved) -> list[str]:
        """Return the attributes that are not stored and differ from the saved ones."""
        found = []
        for name, entry in saved.values.get(PART, {}).items():
            place = self._place(name)
            live: Any = None if place is None else vars(place[0]).get(place[1])
            if "named" in entry and type(live).__qualname__ != entry["named"]:
                found.append(name)
            if "sample" in entry:
                leaves = list(_leaves(live))
                if leaves and sample(leaves) != entry["sample"]:
                    found.append(name)
            elif "length" in entry and type(live) in _CONTAINERS and len(live) != entry["length"]:
                found.append(f"{name} ({entry['length']} items then, {len(live)} now)")
        return sorted(found)


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors and arrays inside a value; of a long container only the first item's."""
    if type(value) in _TENSORS or _is_array(value):
        yield value
    elif (type(value) in _CONTAINERS and depth < len(_ITEMS)) or (
        not depth and _is_named_tuple(value)
    ):
        items = list(value.values() if isinstance(value, dict) else value)
        for item in items if len(items) <= _ITEMS[depth] else items[:1]:
            yield from _leaves(item, depth + 1)


def _is_named_tuple(value: Any) -> bool:
    return issubclass(type(value), tuple) and hasattr(type(value), "_fields")


def _named_tuple(name: str, live: Any, owner: object) -> Any:
    """Return the class of named tuples of this name: the live value's, or one beside the owner's.

    Nothing is imported: a snapshot cannot choose a class that the script does not show there.
    """
    beside = getattr(sys.modules.get(type(owner).__module__), "__dict__", {})
    kinds: tuple[Any, ...] = (type(live), beside.get(name))
    for kind in kinds:
        is_one = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
        if is_one and kind.__qualname__ == name:
            return kind
    return None


def _is_array(value: Any) -> bool:
    """Return True for a NumPy array; does not import NumPy."""
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy"


def is_dense(leaf: Any) -> bool:
    """Return True for a strided tensor that still has its memory."""
    if _is_array(leaf) or leaf.layout is not torch.strided or leaf.is_meta:
        return False
    return bool(leaf.numel() == 0 or leaf.untyped_storage().nbytes() > 0)


def _num_bytes(value: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in _leaves(value))


def _known(registry: Registry) -> set[int]:
    """Return the addresses of all parameters and buffers."""
    tensors = [tensor for model in registry.models for tensor in model.tensors().values()]
    return {_address(dtensor.local(tensor)) for tensor in (*tensors, *registry.all_parameters())}


def _address(leaf: Any) -> int:
    """Return the address of a dense tensor's memory; a negative number for anything else."""
    has_address = is_dense(leaf) and leaf.numel()
    return leaf.untyped_storage().data_ptr() if has_address else -id(leaf)


def _is_storable(value: Any, depth: int = 0) -> bool:
    """Return True for tensors, arrays and plain values, in short containers."""
    if type(value) in _CONTAINERS or (not depth and _is_named_tuple(value)):
        items = value.values() if isinstance(value, dict) else value
        fits = depth < len(_ITEMS) and len(value) <= _ITEMS[depth]
        return fits and all(_is_storable(item, depth + 1) for item in items)
    if type(value) in _TENSORS:
        return is_dense(value) and not value.is_quantized
    if _is_array(value):
        return value.dtype.kind in "biufc" and bool(value.dtype.isnative)
    return value is None or type(value) in (bool, int, float, str)


def _is_trained(leaf: Any) -> bool:
    return not _is_array(leaf) and leaf.requires_grad and leaf.is_leaf


def _reference(value: Any) -> Any:
    """Return a reference to a value: a weak one, but containers cannot have one."""
    is_container = type(value) in _CONTAINERS or _is_named_tuple(value)
    return value if is_container else weakref.ref(value)


def _fill(live: Any, found: Any) -> bool:
    """Give a live value the content of another; return False if it cannot hold that."""
    if isinstance(live, torch.Tensor) and isinstance(found, torch.Tensor):
        alike = (live.dtype, live.device, live.shape) == (found.dtype, found.device, found.shape)
        repeats = any(s == 0 and n > 1 for s, n in zip(live.stride(), live.shape, strict=True))
        if not alike or repeats or not is_dense(live) or live.is_inference():
            return False
        live.copy_(found)
    elif type(live) is not type(found):
        return False
    elif type(live) in _MUTABLE:
        live.clear()
        live.update(found) if isinstance(live, dict) else live.extend(found)
    elif _is_array(live) and live.flags.writeable and live.shape == found.shape:
        live[...] = found
    else:
        return False
    return True


def sample(leaves: Iterable[Any]) -> str:
    """Return a digest of evenly spaced elements of these tensors."""
    blocks: list[bytes | memoryview] = []
    for leaf in leaves:
        blocks.append(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
        if not _is_storable(leaf):
            continue
        count = math.prod(leaf.shape)
        at = torch.linspace(0, count - 1, min(_SAMPLE, count), dtype=torch.float64).long()
        if _is_array(leaf):
            blocks.append(leaf.flat[at.numpy()].tobytes())
        else:
            blocks.append(bytes_of(torch.take(leaf.detach(), at.to(leaf.device))))
    return digest.digest_blocks(blocks)
