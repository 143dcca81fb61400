"""Open the run directory or URL that the user typed as a tier."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.options import LOCAL
from trainckpt.errors import ConfigurationError
from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import open_object_store

if TYPE_CHECKING:
    from trainckpt.storage.base import RunTier


PROVE_VARIABLE = "TRAINCKPT_PROVE"
WORK = "work"  # of a proof's plan: each run's own copy of the file system, as far as it has one
NAME_VARIABLE = "TRAINCKPT_RUN"


def open_run_tier(run: str | os.PathLike[str] | None) -> RunTier:
    """Open the tier at `run`: a path or the URL of an object store; None: the launcher's.

    Raises:
        ConfigurationError: an unknown kind of URL, or none given.
        TierUnavailable: this host has no thread, descriptor or memory left for the store.
    """
    run = run if run is not None else os.environ.get(NAME_VARIABLE)
    proof = os.environ.get(PROVE_VARIABLE)
    if proof:  # a proof leaves the user's own run alone
        run = json.loads(proof)["place"]
    if run is None:
        raise ConfigurationError(
            "no run directory is named",
            hint='name a directory, Checkpointer("runs/x", ...), or launch the script with '
            "`trainckpt run --run runs/x`",
        )
    return open_tier_at(run, LOCAL)  # the run directory has this name at any location


def open_tier_at(run: str | os.PathLike[str], name: str | None = None) -> RunTier:
    """Open the tier at `run` as `open_run_tier` does, but without a proof's redirection.

    `name`: the tier's; None: the kind of store.
    """
    protocol, path = _split_protocol(os.fspath(run))
    if protocol not in ("", "file", "local"):
        return open_object_store(os.fspath(run), name=name)
    if not path:
        raise ConfigurationError("the name of the run directory is empty", hint="name a directory")
    return open_directory(path, name or LOCAL)


def in_proof(path: str) -> str:
    """Return the path to which a run under proof writes instead of `path`: in a copy of its own.

    Outside a proof, and for a URL, `path` itself.
    """
    root = json.loads(os.environ.get(PROVE_VARIABLE) or "{}").get(WORK)
    if root is None or "://" in path:
        return path
    absolute = Path(path).absolute()
    is_inside = Path(root) in absolute.parents
    return str(absolute if is_inside else Path(root, *absolute.parts[1:]))


def seen_from(folder: Path, url: str) -> str:
    """Return the URL as seen from working directory `folder`: a path may be relative to it."""
    if _split_protocol(url)[0] or url.startswith("~"):
        return url
    return str(folder / url)


def _split_protocol(url: str) -> tuple[str, str]:
    """Split off the protocol, "" for a path, like fsspec (slow to import), except for `data:`."""
    protocol, mark, path = url.partition("://")
    is_one = mark and len(protocol) > 1 and "/" not in protocol  # else a path, of strange names
    return (protocol, path) if is_one else ("", url)


def open_directory(path: str, name: str = LOCAL) -> LocalTier:
    """Open the tier at a path, whatever the environment says."""
    if "\0" in path:
        raise ConfigurationError(f"the run directory is no path: {path[:100]!r}")
    try:
        return LocalTier(Path(path).expanduser(), name=name)
    except RuntimeError as error:
        raise ConfigurationError(f"{path[:100]}: {error}", hint="name a directory") from error
