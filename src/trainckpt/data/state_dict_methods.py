"""Recognise objects with `state_dict` and `load_state_dict`, and those unusable without arguments.

The `state_dict` of litdata's and mosaicml's streams needs the number of samples yielded, known
only to the libraries' own loaders. Every save would fail, so such objects are refused up front.
"""

from __future__ import annotations

import inspect
from typing import Any

from trainckpt.errors import ConfigurationError

_METHODS = {"state_dict": 0, "load_state_dict": 1}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_LOADERS = {"litdata": "litdata.StreamingDataLoader", "streaming": "streaming.StreamingDataLoader"}


def has_state(thing: Any) -> bool:
    """Return True if the object has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(thing, method, None)) for method in _METHODS)


def has_usable_state(thing: Any) -> bool:
    """Return True if the object has both methods and neither needs more arguments."""
    return has_state(thing) and not any(
        _required_parameters(getattr(thing, method))[given:] for method, given in _METHODS.items()
    )


def refuse_arguments(thing: Any, name: str) -> None:
    """Raise ConfigurationError if the object's state methods need further arguments."""
    for method, given in _METHODS.items():
        missing = _required_parameters(getattr(thing, method))[given:]
        if not missing:
            continue
        kind = type(thing).__qualname__
        loader = next((one for root, one in _LOADERS.items() if is_of(thing, root)), None)
        raise ConfigurationError(
            f"{name}: {kind}.{method} cannot be called without {' and '.join(missing)}, so every "
            "save would fail",
            hint=f"use {loader} in place of torch's DataLoader: it keeps the position of {kind}"
            if loader
            else f"use the loader that {kind} is made for, if it has a state_dict of its own, or "
            f"give {kind} a {method} that needs no more",
        )


def is_of(thing: Any, package: str) -> bool:
    """Return True for a function or an object that is of a package, or of a class derived there."""
    kinds = (
        type(thing).__mro__ if not hasattr(thing, "__module__") else (thing, *type(thing).__mro__)
    )
    return any(str(kind.__module__).partition(".")[0] == package for kind in kinds)


def _required_parameters(method: Any) -> list[str]:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return []
    needed = [p for p in parameters if p.default is p.empty]
    keywords = [p.name for p in needed if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return [p.name for p in needed if p.kind in _POSITIONAL] + keywords
