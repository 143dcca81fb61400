"""Check a framework before use: installed, and built as expected.

Training frameworks offer no way to stop at a position of the data inside a window. So each
integration relies on a few attributes beyond the documented ones. They are listed as values, and
checked when the integration is attached. A release without one is refused in one sentence, instead
of a wrong resume.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.attempt import log
from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable


class RequiredAttribute(NamedTuple):
    """One attribute an integration relies on.

    Attributes:
        owner: "module:Class" or "module".
        name: The attribute, as found on the class or module.
        why: Its purpose, to end the sentence "... is not there, which ...".
    """

    owner: str
    name: str
    why: str


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


def check(package: str, relied: Iterable[RequiredAttribute]) -> None:
    """Check all required attributes.

    Args:
        package: Name of the distribution, reported with its version.
        relied: The required attributes.

    Raises:
        ConfigurationError: Some are missing; one sentence names all of them.
    """
    _refuse(package, [one for one in relied if not _is_there(one)])


def check_object(package: str, value: object, relied: Iterable[tuple[str, str]]) -> None:
    """Check attributes made in constructors: on an object, not on its class.

    Args:
        package: Name of the distribution, reported with its version.
        value: The object, with the attributes on it or nested.
        relied: (path of attributes such as "loop.progress", its purpose).

    Raises:
        ConfigurationError: Some are missing; one sentence names all of them.
    """
    owner = type(value).__qualname__
    gone = [RequiredAttribute(owner, path, why) for path, why in relied if not _has(value, path)]
    _refuse(package, gone)


def _refuse(package: str, gone: list[RequiredAttribute]) -> None:
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


def _is_there(one: RequiredAttribute) -> bool:
    module, _, inner = one.owner.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in inner.split("."):
        owner = getattr(owner, part, None) if part else owner
    return owner is not None and hasattr(owner, one.name)
