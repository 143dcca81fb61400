"""The end of a library's connections: closed when the interpreter ends, and not before.

Collected earlier, on whatever thread, they could not be closed on their own loop, and would say so.
A process that was forked has no thread that runs that loop: who waits for it there never ends.
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
    """Keep `filesystem` until the process ends, and then close what it has opened.

    What the library itself would do then is left undone where it waits for the loop.
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
        loop = filesystem._loop  # `loop` refuses to be asked by another process
        loop.set_exception_handler(lambda *_: None)  # that nobody has closed them
        return
    with contextlib.suppress(Exception):
        sync(filesystem.loop, close, timeout=CLOSE_S)
