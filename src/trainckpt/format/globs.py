"""Select tensors by glob, and rename them. Pure; used by `load`, `export` and the option `exclude`.

A glob with a `/` is matched with full names (`model/blocks.*`, `optimizer/*/exp_avg`), one without
with the paths inside every model (`blocks.*.weight`, `*.bias`). `*` stands for any text, dots and
slashes too; `?` for one character; `[ab]` for one of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


Rename = Mapping[str, str] | Callable[[str], str | None]


def parse_rename(value: Any) -> Rename:
    """Parse "blocks: encoder, head: out", the same as a mapping, or a function.

    Raises:
        ValueError: it is none of these, or empty.
    """
    if callable(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Mapping):
        pairs = [(old, new) for old, new in value.items()]
    else:
        parts = [part.partition(":") for part in value.split(",")]
        if not all(colon for _, colon, _ in parts):
            raise ValueError(value)
        pairs = [(old.strip(), new.strip()) for old, _, new in parts]
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ValueError(value)
    return dict(pairs)


def renamed(known: Mapping[str, str], rename: Rename) -> dict[str, str]:
    """Return new full name -> value of `known`, whose keys are full names.

    Args:
        known: Full name -> anything.
        rename: Beginning of a path inside the models -> another one, of which the longest counts;
            or a function from path to path, or to None for a name to leave out.

    Raises:
        ConfigurationError: a beginning is that of no path, or two tensors get one name.
    """
    found: dict[str, str] = {}
    used: set[str] = set()
    for full, value in known.items():
        model, _, path = full.partition("/")
        if callable(rename):
            new = rename(path)
        else:
            fitting = [old for old in rename if _begins(path, old)]
            used.update(fitting)
            old = max(fitting, key=len, default=None)
            rest = path if old is None else path[len(old.rstrip(".")) :].removeprefix(".")
            new = ".".join(filter(None, (None if old is None else rename[old].rstrip("."), rest)))
        if new is None:
            continue
        name = f"{model}/{new}"
        if found.get(name, value) != value:
            raise ConfigurationError(
                f"rename gives {found[name]} and {value} the same name, {name}",
                hint="let each tensor have a name of its own; a function may return None for one",
            )
        found[name] = value
    unused = [] if callable(rename) else [old for old in rename if old not in used]
    if unused:
        raise ConfigurationError(
            f"rename: no tensor of the snapshot begins with {unused[0]!r}",
            hint=f"use {_near(unused[0], known)}",
        )
    return found


def _begins(path: str, prefix: str) -> bool:
    prefix = prefix.rstrip(".")
    return not prefix or path == prefix or path.startswith(f"{prefix}.")


def _near(glob: str, known: Collection[str]) -> str:
    paths = {name if "/" in glob else name.partition("/")[2]: name for name in sorted(known)}
    near = [paths[path] for path in get_close_matches(glob, paths, n=5, cutoff=0.3)]
    listed = near or sorted(known)[:5]
    return f"one of {', '.join(listed)}" if listed else "nothing: there are no tensors"
