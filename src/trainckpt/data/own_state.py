"""Objects that save and load their own state, and those that only seem to.

litdata's and mosaicml's streams have a `state_dict` that needs to be told how many samples were
yielded: only their own loaders know that. Every save would fail, so it is refused before the first.

Used by: sampler.py, sources.py; `refuse_arguments` by the registry of tracked objects too.
"""

from __future__ import annotations

import inspect
from typing import Any

from trainckpt.errors import ConfigurationError

_METHODS = {"state_dict": 0, "load_state_dict": 1}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_LOADERS = {"litdata": "litdata.StreamingDataLoader", "streaming": "streaming.StreamingDataLoader"}


def has_state(thing: Any) -> bool:
    """Tell whether an object saves and loads its own state."""
    return all(callable(getattr(thing, method, None)) for method in _METHODS)


def asks_nothing(thing: Any) -> bool:
    """Tell whether it does, and needs no arguments for it."""
    return has_state(thing) and not any(
        _required(getattr(thing, method))[given:] for method, given in _METHODS.items()
    )


def refuse_arguments(thing: Any, name: str) -> None:
    """Raise ConfigurationError if its state cannot be asked for, or loaded, without arguments."""
    for method, given in _METHODS.items():
        missing = _required(getattr(thing, method))[given:]
        if not missing:
            continue
        kind = type(thing).__qualname__
        loader = _LOADERS.get(type(thing).__module__.partition(".")[0])
        raise ConfigurationError(
            f"{name}: {kind}.{method} cannot be called without {' and '.join(missing)}, so every "
            "save would fail",
            hint=f"use {loader} in place of torch's DataLoader: it keeps the position of {kind}"
            if loader
            else f"use the loader that {kind} is made for, if it has a state_dict of its own, or "
            f"give {kind} a {method} that needs no more",
        )


def _required(method: Any) -> list[str]:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # one written in C that does not tell
        return []
    needed = [p for p in parameters if p.default is p.empty]
    keywords = [p.name for p in needed if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return [p.name for p in needed if p.kind in _POSITIONAL] + keywords
