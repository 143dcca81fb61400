"""The run's place: from what the user typed to a tier."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fsspec.core import split_protocol

from trainckpt.errors import ConfigurationError
from trainckpt.format import names
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.object_store import ObjectStoreTier, open_object_store

PROVE_VARIABLE = "TRAINCKPT_PROVE"
NAME_VARIABLE = "TRAINCKPT_RUN"


def open_place(run: str | os.PathLike[str] | None) -> LocalTier:
    """The tier at `run`: a path or a `file://` URL; None: as the launcher named it.

    Raises:
        ConfigurationError: a URL of another kind, or nobody named a place.
    """
    run = run if run is not None else os.environ.get(NAME_VARIABLE)
    proof = os.environ.get(PROVE_VARIABLE)
    if proof:  # a proof leaves the user's own run alone
        run = json.loads(proof)["place"]
    if run is None:
        raise ConfigurationError(
            "the run has no place",
            hint='name a directory, Checkpointer("runs/x", ...), or launch the script with '
            "`trainckpt run --run runs/x`",
        )
    tier = open_other_place(run)
    if not isinstance(tier, LocalTier):
        raise ConfigurationError(
            f"{tier.url}: object stores are not supported by this version as a run's own place",
            hint="name a directory that all hosts see",
        )
    return tier


def open_other_place(run: str | os.PathLike[str]) -> LocalTier | ObjectStoreTier:
    """The tier at `run`, as `open_place`; also in a proof, which moves only the proven run."""
    protocol, path = split_protocol(os.fspath(run))
    if protocol not in (None, "file", "local"):
        return open_object_store(os.fspath(run))
    if not path:
        raise ConfigurationError("the run's place is empty", hint="name a directory")
    return open_directory(path)


def open_directory(path: str) -> LocalTier:
    """The tier at a path, whatever the environment says."""
    if "\0" in path:
        raise ConfigurationError(f"the run's place is no path: {path[:100]!r}")
    try:
        return LocalTier(Path(path).expanduser())
    except RuntimeError as error:
        raise ConfigurationError(f"{path[:100]}: {error}", hint="name a directory") from error


def notices_folder(tier: LocalTier) -> Path:
    """Where notices for this run's attempts are put."""
    return tier.root / names.NOTICES
