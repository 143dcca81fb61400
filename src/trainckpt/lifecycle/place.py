"""The run's place: from what the user typed to a tier, and back to what a supervisor reads."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.core import split_protocol

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.format import names
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainckpt.tiers.base import Tier

SUPERVISOR_VARIABLE = "TRAINCKPT_SUPERVISOR"
PROVE_VARIABLE = "TRAINCKPT_PROVE"


def open_place(run: str | os.PathLike[str]) -> LocalTier:
    """The tier at `run`: a path or a `file://` URL.

    Raises:
        ConfigurationError: a URL of another kind.
    """
    proof = os.environ.get(PROVE_VARIABLE)
    if proof:  # a proof leaves the user's own run alone
        run = json.loads(proof)["place"]
    protocol, path = split_protocol(os.fspath(run))
    if protocol not in (None, "file", "local"):
        raise ConfigurationError(
            f"{run}: object stores are not supported by this version",
            hint="name a directory that all hosts see; object stores come with issue 6",
        )
    if not path:
        raise ConfigurationError("the run's place is empty", hint="name a directory")
    return LocalTier(Path(path).expanduser())


def open_directory(path: str) -> LocalTier:
    """The tier at a path, whatever the environment says."""
    return LocalTier(Path(path).expanduser())


def notices_folder(tier: LocalTier) -> Path:
    """Where notices for this run's attempts are put."""
    return tier.root / names.NOTICES


def tell_supervisor(tier: Tier, attempt: int, rank: int) -> None:
    """Rank 0 tells the supervisor that launched it where the attempt's record lies."""
    _tell({"run": tier.url, "attempt": attempt}, rank)


@contextmanager
def refusal_told(rank: int) -> Iterator[None]:
    """Rank 0 tells the supervisor the code of an error in here: its launcher would swallow it."""
    try:
        yield
    except TrainckptError as error:
        _tell({"exit_code": error.exit_code}, rank)
        raise


def _tell(message: dict[str, Any], rank: int) -> None:
    file = os.environ.get(SUPERVISOR_VARIABLE)
    if not file or rank != 0:
        return
    path = Path(file)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(message), encoding="utf-8")
    temporary.replace(path)
