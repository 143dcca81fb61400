"""Compare a tracked object's state_dict after loading with the loaded state.

A `load_state_dict` may drop a part, cast it, or defer it. The object's state after loading is
compared with the saved one, value by value and tensors by every byte. The order of a dict, list
versus tuple, and a clock's advance do not count.

Objects of integrations may load in several steps, or derive their state_dict from later
registrations. They declare it (`__trainckpt_loads_in_steps__`), and are not compared.

Used right after a snapshot was applied.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TrainckptError
from trainckpt.format import json_io
from trainckpt.format.exactness import How, Restored
from trainckpt.state.captured import Captured
from trainckpt.state.staging import tensor_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trainckpt.state.adapters.stateful import GenericState
    from trainckpt.state.captured import Saved

    Spell = Callable[[dict[str, Any]], str]

_NAMED = 3  # most paths named in a reason
_CLOCK = re.compile(r"(?:^|[._])(?:time|seconds|elapsed|duration|runtime)(?:$|[._])")


def compare(generic: GenericState, saved: Saved) -> list[Restored]:
    """Return the saved state missing from an object after loading, as one part."""
    if generic.name not in saved.values:
        return []
    if getattr(type(generic.target), "__trainckpt_loads_in_steps__", False):
        return []
    live = Captured()
    try:
        generic.capture(live)
    except (TrainckptError, RuntimeError, AttributeError, TypeError, ValueError, LookupError) as e:
        why = f"{generic.name} does not tell its state after it was loaded: {e}"
        return [Restored(generic.name, How.NOT_KEPT, why[:300])]
    then = _leaves(saved.values[generic.name], generic.name, _spell(saved.tensors))
    now = _leaves(live.values[generic.name], generic.name, _spell(live.tensors))
    paths = sorted(
        path
        for path in then.keys() | now.keys()
        if then.get(path) != now.get(path) and not _ran_on(path, then.get(path), now.get(path))
    )
    if not paths:
        return []
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    kind = type(generic.target).__qualname__
    why = (
        f"{generic.name}: what a {kind} gives by state_dict() after load_state_dict() is not what "
        f"was loaded: {', '.join(paths[:_NAMED])}{more}"
    )
    return [Restored(generic.name, How.NOT_KEPT, why)]


def _spell(tensors: dict[str, torch.Tensor]) -> Spell:
    def spell(node: dict[str, Any]) -> str:
        names = node.get("parts", [node["$tensor"]])
        found = [tensor_digest(tensors[name]) if name in tensors else "" for name in names]
        return f"{found} {node.get('sparse')}"

    return spell


def _leaves(tree: Any, path: str, spell: Spell) -> dict[str, Any]:
    """Return path -> value of an encoded tree; for an empty container the path alone."""
    if isinstance(tree, dict) and "$tensor" in tree:
        return {path: spell(tree)}
    if isinstance(tree, dict) and tree.get("$") == "numpy" and isinstance(tree["of"], dict):
        return {path: (tree["dtype"], tree["shape"], spell(tree["of"]))}
    pairs: list[tuple[str, Any]]
    if isinstance(tree, list):
        pairs = [(str(number), item) for number, item in enumerate(tree)]
    elif isinstance(tree, dict) and tree.get("$") == "dict":
        pairs = [
            (key if isinstance(key, str) else json_io.canonical(key).decode(), item)
            for key, item in tree["of"]
        ]
    elif isinstance(tree, dict) and "$" not in tree:  # live objects in a state_dict
        pairs = list(tree.items())
    elif isinstance(tree, dict) and isinstance(tree["of"], list) and tree["$"] != "complex":
        pairs = [(str(number), item) for number, item in enumerate(tree["of"])]
    else:
        return {path: tree}
    found: dict[str, Any] = {} if pairs else {path: ()}
    for key, item in pairs:
        found.update(_leaves(item, f"{path}.{key}", spell))
    return found


def _ran_on(path: str, then: Any, now: Any) -> bool:
    """Return True for a time value, by its name, if it has advanced since the save."""
    are_times = type(then) is float and type(now) is float and _CLOCK.search(path) is not None
    return are_times and now >= then
