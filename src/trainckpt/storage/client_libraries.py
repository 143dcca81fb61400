"""A separate random generator for the libraries of object stores and collectors of metrics.

They draw from Python's module `random`: aiohttp for the next host, botocore every few hours for the
time to renew a cloud instance's credentials, OpenTelemetry before each request. On a background
thread these draws would move the generator a script shuffles with, at a moment no other run
repeats. So `random` inside these libraries is replaced by a second copy of the module.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from functools import cache
from typing import Any

LIBRARIES = frozenset(
    [
        "aiobotocore",
        "aiohttp",
        "botocore",
        "s3fs",
        "gcsfs",
        "google",
        "adlfs",
        "azure",
        "opentelemetry",
        "fsspec",
        "requests",
        "urllib3",
    ]
)


def give_own_randomness() -> None:
    """Replace `random` in all such libraries loaded so far. May be repeated."""
    own = _replacements()
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and module is not None:
            for attribute, value in tuple(vars(module).items()):
                if id(value) in own:
                    setattr(module, attribute, own[id(value)])


@cache
def _replacements() -> dict[int, Any]:
    """Return the copy, by identity of the original: of `random`, and of its functions that share
    the global generator."""
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)  # seeds itself from the system
    shared = own.random.__self__
    drawing = [n for n in own.__all__ if getattr(getattr(own, n), "__self__", None) is shared]
    return {id(random): own, **{id(getattr(random, n)): getattr(own, n) for n in drawing}}
