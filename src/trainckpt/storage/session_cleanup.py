"""Close a library's connections when the interpreter ends, and not before.

Garbage-collected earlier, on any thread, they could not be closed on their event loop, and would
log it. A forked process has no thread running this loop: waiting for it there never ends.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any

from fsspec.asyn import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
