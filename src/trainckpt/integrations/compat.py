"""Check a framework before use: installed, and built as expected.

Training frameworks offer no way to stop at a position of the data inside a window. So each
integration relies on a few attributes beyond the documented ones, and replaces some on the objects
of one training. They are listed as values, and checked when the integration is attached. A release
without one is refused in one sentence, instead of a wrong resume.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import log
from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import ExitStack
    from types import FrameType


def require(module: str, extra: str) -> Any:
    """Import a framework. Uncaught refusals end the script with their own exit code from now on.

    Raises:
        ConfigurationError: It is not installed; the hint is the line to install it.
    """
    log.install()
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigurationError(
            f"trainckpt.{extra} needs the package {package}, which is not installed",
            hint=f"pip install 'trainckpt[{extra}]'",
        ) from error


def check(package: str, relied: Iterable[tuple[str, str, str]]) -> None:
    """Check attributes of classes and modules.

    Args:
        package: Name of the distribution, reported with its version.
        relied: (owner, "module:Class" or "module"; name; purpose, to end "X, which ...").

    Raises:
        ConfigurationError: Some are missing; one sentence names all of them.
    """
    gone = [(owner, name, why) for owner, name, why in relied if not _has(_find(owner), name)]
    _refuse(package, [f"{owner}.{name}, which {why}" for owner, name, why in gone])


def check_object(package: str, value: object, relied: Iterable[tuple[str, str]]) -> None:
    """Check attributes made in constructors: on an object, not on its class; errors as `check`.

    Args:
        package: Name of the distribution, reported with its version.
        value: The object, with the attributes on it or nested.
        relied: (path of attributes such as "loop.progress", its purpose).
    """
    owner = type(value).__qualname__
    gone = [(path, why) for path, why in relied if not _has(value, path)]
    _refuse(package, [f"{owner}.{path}, which {why}" for path, why in gone])


def check_code(package: str, used: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Check that functions use these names, so still do what is relied on; errors as `check`.

    Args:
        package: Name of the distribution, reported with its version.
        used: ("module:Class.method", names in its code; "name=" is a parameter).
    """
    gone = []
    for path, names in used:
        code = getattr(inspect.unwrap(_find(path) or repr), "__code__", None)
        there = {*code.co_names, *(f"{name}=" for name in code.co_varnames)} if code else set()
        gone += [f"{name.rstrip('=')} in {path}" for name in names if name not in there]
    _refuse(package, gone)


def _refuse(package: str, gone: list[str]) -> None:
    if gone:
        version = importlib.metadata.version(package)
        raise ConfigurationError(
            f"trainckpt does not know the internals of {package} {version}: it lacks "
            f"{'; '.join(gone)}",
            hint=f"use a version of {package} named in docs/versions.md",
        )


def _has(value: object, path: str) -> bool:
    try:
        attrgetter(path)(value)
    except AttributeError:
        return False
    return value is not None


def _find(path: str) -> Any:
    """Return the module "module", or what "module:Class.method" names in it; None: missing."""
    module, _, inner = path.partition(":")
    try:
        return reduce(getattr, filter(None, inner.split(".")), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def replace_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of one object until `undo` is closed."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    if is_own:
        undo.callback(setattr, owner, name, before)
    else:
        undo.callback(delattr, owner, name)


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of the calling functions, from the innermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def one_or_all(items: list[Any]) -> Any:
    """Return the only item itself, or the list: as `Checkpointer` tracks objects under one name."""
    return items[0] if len(items) == 1 else items
