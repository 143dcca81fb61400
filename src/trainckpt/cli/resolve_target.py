"""Resolve the run and snapshot to resume from the user's words, before anything is launched.

A launch that cannot find it would end in a traceback of the script, and leave a failed attempt.
"""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

from trainckpt.errors import NothingToResume, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import names
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.snapshot.catalog import Candidate
from trainckpt.storage import replica_slots
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainckpt.storage.base import Place


def must_be_there(tier: Place, run: str, given: Sequence[str], wanted: str) -> None:
    """Refuse a snapshot that no launch would find.

    Args:
        tier, run: The run's place, which holds it, and how it was called.
        given: URLs of tiers that somebody has named.
        wanted: What the snapshot is called.

    Raises:
        UnusableSnapshot: there is none of that name, or it was not committed.
    """
    with contextlib.suppress(UnusableSnapshot):
        catalog.find(_in_memory(tier.url), wanted)
        return
    everywhere = open_everywhere(run, *given)
    if everywhere.silent:
        return  # a tier that does not answer now may hold it: the launch finds out
    candidate = catalog.find(everywhere.candidates(), wanted, tier.url)
    if candidate.manifest is None:
        raise UnusableSnapshot(
            f"{candidate.name}: {candidate.reason}",
            hint=f"trainckpt list {tier.url}, and name another",
        )


def _in_memory(url: str) -> Iterator[Candidate]:
    """Yield snapshots that a launch may bring from this host's memory to the run directory."""
    memory = SharedMemoryDir.found(url)
    if memory is None:
        return
    for folder in memory.folders():
        data = replica_slots.read_manifest(memory, folder, manifests.MAX_BYTES)
        with contextlib.suppress(UnusableSnapshot):
            manifest = manifests.load(data or b"", folder)
            yield Candidate(manifest.name, manifest, usable=True)


def no_run(run: str, error: NothingToResume) -> NothingToResume:
    """Return the error for a URL `run` without a run: `error`, or a guess at the intended URL."""
    run_part, snapshot = names.split_target(run)
    if snapshot is None or not _is_run(run_part):
        return error
    at_option = f" --at {shlex.quote(snapshot)}" if snapshot else ""
    return NothingToResume(
        f"{error.message}; there is one at {run_part}",
        hint=f"trainckpt resume {shlex.quote(run_part)}{at_option}",
    )


def _is_run(run: str) -> bool:
    with contextlib.suppress(TrainckptError):  # nobody has asked for that one
        return attempt_history.run_id(run_url.open_place(run)) is not None
    return False
