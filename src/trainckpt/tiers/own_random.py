"""A random generator of their own for the libraries that speak to stores.

They draw from the functions of Python's module `random`: the host to serve next (aiohttp), how
early to renew the credentials of a cloud instance (botocore, each time it has fetched them: every
few hours, by the clock). On a thread beside training that moves the generator by which a script
shuffles and augments, at an instant that no other run has. So what such a library has imported is
replaced by a second copy of the module.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

LIBRARIES = frozenset({
    "aiobotocore", "aiohttp", "botocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "fsspec",
    "requests", "urllib3",
})  # fmt: skip


def give_own_randomness() -> None:
    """To all such libraries, as far as they are loaded. May be repeated."""
    own = _own()
    given: dict[int, Any] = {id(getattr(random, n)): getattr(own, n) for n in _drawing(own)}
    given[id(random)] = own
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and module is not None:
            found = [each for each in vars(module).items() if id(each[1]) in given]
            for attribute, value in found:
                setattr(module, attribute, given[id(value)])


@cache
def _own() -> ModuleType:
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)  # seeds itself from the system
    return own


def _drawing(own: ModuleType) -> list[str]:
    """Names of the functions that draw from a module's generator, or change it."""
    shared = own.random.__self__
    return [n for n in own.__all__ if getattr(getattr(own, n), "__self__", None) is shared]
