"""A separate random generator for the libraries of object stores.

They draw from Python's module `random`: aiohttp for the next host, botocore every few hours for the
time to renew a cloud instance's credentials. On a background thread these draws would move the
generator a script shuffles with, at a moment no other run repeats. So `random` inside these
libraries is replaced by a second copy of the module.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

LIBRARIES = frozenset(
    {
        "aiobotocore",
        "aiohttp",
        "botocore",
        "s3fs",
        "gcsfs",
        "google",
        "adlfs",
        "azure",
        "fsspec",
        "requests",
        "urllib3",
    }
)


def give_own_randomness() -> None:
    """Replace `random` in all such libraries loaded so far. May be repeated."""
    own = _own_random()
    given: dict[int, Any] = {id(getattr(random, n)): getattr(own, n) for n in _drawing(own)}
    given[id(random)] = own
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and module is not None:
            found = [each for each in vars(module).items() if id(each[1]) in given]
            for attribute, value in found:
                setattr(module, attribute, given[id(value)])


@cache
def _own_random() -> ModuleType:
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)  # seeds itself from the system
    return own


def _drawing(own: ModuleType) -> list[str]:
    """Return the names of the functions drawing from, or changing, a module's shared generator."""
    shared = own.random.__self__
    return [n for n in own.__all__ if getattr(getattr(own, n), "__self__", None) is shared]
