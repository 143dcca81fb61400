"""Take tensor subclasses apart into their inner tensors, and rebuild them.

Low-bit optimizer states and quantised weights are examples. `__tensor_flatten__` names the inner
plain tensors, and `__tensor_unflatten__` rebuilds the subclass. The inner tensors are stored, so
nothing is cast. A snapshot names the class. A resume searches the classes defined or imported by
the script: nothing is imported by a name from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainckpt.errors import UnusableSnapshot
from trainckpt.state import values
from trainckpt.state.dtensor import PLAIN, is_sharded

if TYPE_CHECKING:
    from collections.abc import Mapping

FLATTEN, UNFLATTEN = "__tensor_flatten__", "__tensor_unflatten__"


class Flat(NamedTuple):
    """A subclass taken apart.

    Attributes:
        inner: Attribute -> inner tensor.
        context: The other arguments of `__tensor_unflatten__`.
    """

    inner: dict[str, torch.Tensor]
    context: Any


def flatten(tensor: torch.Tensor) -> Flat | None:
    """Take one level of a subclass apart; None if it does not show its inner tensors."""
    if type(tensor) in PLAIN or not hasattr(tensor, FLATTEN):
        return None
    attributes, context = getattr(tensor, FLATTEN)()
    return Flat({name: getattr(tensor, name) for name in attributes}, context)


def describe(tensor: torch.Tensor) -> list[Any] | None:
    """Return the class and context of a subclass as JSON; None for a plain or sharded tensor.

    A context not expressible as JSON is left out: it is not compared.
    """
    flat = None if type(tensor) in PLAIN or is_sharded(tensor) else flatten(tensor)
    if flat is None:
        return None
    try:
        return [name_of(type(tensor)), values.encode(flat.context, "context", refuse_tensor)]
    except values.UnknownValue:
        return [name_of(type(tensor))]


def refuse_tensor(path: str, tensor: torch.Tensor) -> Any:
    """Refuse a tensor in a context, for `values.encode`."""
    del tensor
    raise values.UnknownValue(f"{path} holds a tensor, which {FLATTEN} has to name")


def name_of(kind: type) -> list[str]:
    """Return the name of a class for a snapshot: module and qualified name."""
    return [kind.__module__, kind.__qualname__]


def rebuild(
    name: Any, inner: Mapping[str, torch.Tensor], context: Any, size: Any, stride: Any
) -> torch.Tensor:
    """Return a subclass rebuilt from its inner tensors.

    Raises:
        UnusableSnapshot: The class is missing, or rejects these arguments.
    """
    kind = _find(name)
    if kind is None:
        raise UnusableSnapshot(
            f"the snapshot has a tensor of class {str(name)[:100]}, which nothing has imported",
            hint="import the module that defines it before the Checkpointer is made",
        )
    try:
        made = getattr(kind, UNFLATTEN)(dict(inner), context, torch.Size(size), tuple(stride))
    except Exception as error:
        raise UnusableSnapshot(
            f"a tensor of class {kind.__qualname__} cannot be put together of what was saved: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, torch.Tensor):
        raise UnusableSnapshot(f"{kind.__qualname__}.{UNFLATTEN} made no tensor")
    return made


def _find(name: Any) -> type | None:
    """Return the subclass of this name, or None; of several the last in breadth-first order."""
    found, todo = None, [torch.Tensor]
    while todo:
        kind = todo.pop(0)
        todo += kind.__subclasses__()
        if name_of(kind) == name and hasattr(kind, FLATTEN) and hasattr(kind, UNFLATTEN):
            found = kind
    return found
