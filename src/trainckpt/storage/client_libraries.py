"""A separate random generator for the libraries of object stores and collectors of metrics.

They draw from Python's module `random`: aiohttp for the next host, botocore every few hours for the
time to renew a cloud instance's credentials, OpenTelemetry before each request. On a background
thread these draws would move the generator a script shuffles with, at a moment no other run
repeats. So `random` inside these libraries is replaced by a second copy of the module.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import sys
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from fsspec.asyn import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
    """Return those of the module, and of its functions that share one generator, by identity."""
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)  # seeds itself from the system
    shared = own.random.__self__
    drawing = [n for n in own.__all__ if getattr(getattr(own, n), "__self__", None) is shared]
    return {id(random): own, **{id(getattr(random, n)): getattr(own, n) for n in drawing}}


# ---- connections: closed when the interpreter ends, not before
#
# Garbage-collected earlier, on any thread, they could not be closed on their event loop, and would
# log it. A forked process has no thread running this loop: waiting for it there never ends.


CLOSE_S = 1.0


def close_at_the_end(filesystem: Any, connections: Callable[[], Iterable[Any]]) -> None:
    """Keep `filesystem` until the process ends, then close its connections.

    The library's own finalizer, waiting for the loop, is removed.
    """
    for each in list(getattr(weakref.finalize, "_registry", ())):
        found = each.peek()
        if found is not None and found[0] is filesystem and found[1] is sync:
            each.detach()
    weakref.finalize(filesystem, _close, os.getpid(), filesystem, connections)


def _close(pid: int, filesystem: Any, connections: Callable[[], Iterable[Any]]) -> None:
    async def close() -> None:
        for each in connections():
            if each is not None:
                await each.close()

    if pid != os.getpid():
        loop = filesystem._loop  # the property `loop` raises in a forked process
        loop.set_exception_handler(lambda *_: None)  # no log of unclosed connections
        return
    with contextlib.suppress(Exception):
        sync(filesystem.loop, close, timeout=CLOSE_S)
