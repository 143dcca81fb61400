"""What an integration needs of a framework: that it is there, and that it is built as expected.

Training frameworks offer no way to hold, inside a window, the place in the data; each integration
therefore relies on a few attributes beyond the documented ones. They are listed as values and
looked at when the integration is attached, so that a release which moved one is refused in one
sentence instead of resuming wrongly.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Relied(NamedTuple):
    """One thing an integration relies on.

    Attributes:
        owner: "module:Class" or "module".
        name: The attribute, as found on the class or module.
        why: What it is for, to end the sentence "... is not there, which ...".
    """

    owner: str
    name: str
    why: str


def require(module: str, extra: str) -> Any:
    """Import a framework.

    Raises:
        ConfigurationError: it is not installed; the hint is the line that installs it.
    """
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


def check(package: str, relied: Iterable[Relied]) -> None:
    """Look at everything an integration relies on.

    Args:
        package: The distribution's name, whose version is told.
        relied: What must be there.

    Raises:
        ConfigurationError: something is not; one sentence names all of it.
    """
    _refuse(package, [one for one in relied if not _is_there(one)])


def check_object(package: str, value: object, relied: Iterable[tuple[str, str]]) -> None:
    """Look at what is made in constructors: on an object, not on its class.

    Args:
        package: The distribution's name, whose version is told.
        value: Has all of it, directly or further in.
        relied: (path of attributes such as "loop.progress", what it is for).

    Raises:
        ConfigurationError: something is not there; one sentence names all of it.
    """
    owner = type(value).__qualname__
    gone = [Relied(owner, path, why) for path, why in relied if not _has(value, path)]
    _refuse(package, gone)


def _refuse(package: str, gone: list[Relied]) -> None:
    if gone:
        told = "; ".join(f"{one.owner}.{one.name}, which {one.why}" for one in gone)
        version = importlib.metadata.version(package)
        raise ConfigurationError(
            f"{package} {version} is built in another way than trainckpt knows: it lacks {told}",
            hint=f"use a version of {package} named in docs/versions.md",
        )


def _has(value: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def _is_there(one: Relied) -> bool:
    module, _, inner = one.owner.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in inner.split("."):
        owner = getattr(owner, part, None) if part else owner
    return owner is not None and hasattr(owner, one.name)
