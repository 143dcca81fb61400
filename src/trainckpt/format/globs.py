"""Select tensors by glob. Pure; used by `load`, `export` and the option `exclude`.

A glob with a `/` is matched with full names (`model/blocks.*`, `optimizer/*/exp_avg`), one without
with the paths inside every model (`blocks.*.weight`, `*.bias`). `*` stands for any text, dots and
slashes too; `?` for one character; `[ab]` for one of those.
"""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def parse_globs(value: Any) -> tuple[str, ...]:
    """Parse one glob, a comma-separated list, or a list; raise `ValueError` for anything else."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    found = tuple(item.strip() for item in items)
    if not all(found):
        raise ValueError(value)
    return found


def matches(glob: str, name: str, models: Collection[str]) -> bool:
    """Return True if `glob` matches the full name `name`; `models`: names of the models."""
    if "/" in glob:
        return fnmatchcase(name, glob)
    model, _, path = name.partition("/")
    return model in models and fnmatchcase(path, glob)


def select(globs: Iterable[str], known: Collection[str], models: Collection[str]) -> set[str]:
    """Return the `known` names matched by any glob.

    Raises:
        ConfigurationError: a glob matches none; the hint lists similar names.
    """
    found: set[str] = set()
    for glob in globs:
        hits = {name for name in known if matches(glob, name, models)}
        if not hits:
            raise ConfigurationError(
                f"no tensor is called {glob!r}", hint=f"use {_near(glob, known)}"
            )
        found |= hits
    return found


def _near(glob: str, known: Collection[str]) -> str:
    paths = {name if "/" in glob else name.partition("/")[2]: name for name in sorted(known)}
    near = [paths[path] for path in get_close_matches(glob, paths, n=5, cutoff=0.3)]
    listed = near or sorted(known)[:5]
    return f"one of {', '.join(listed)}" if listed else "nothing: there are no tensors"
