"""What somebody calls a run, and a snapshot of it, to resume: judged before anything is launched.

A launch that cannot find it would end in a traceback of the script, and leave a failed attempt.
"""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

from trainckpt.errors import NothingToResume, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import names
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.places.everywhere import open_everywhere
from trainckpt.snapshot import attempts, catalog
from trainckpt.snapshot.catalog import Candidate
from trainckpt.tiers import kept
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainckpt.tiers.places import Place


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
    found = catalog.find(everywhere.candidates(), wanted, tier.url)
    if found.manifest is None:
        raise UnusableSnapshot(
            f"{found.name}: {found.reason}", hint=f"trainckpt list {tier.url}, and name another"
        )


def _in_memory(url: str) -> Iterator[Candidate]:
    """What a launch may bring from this host's memory to the run's place, before it chooses."""
    memory = MemoryPlace.found(url)
    if memory is None:
        return
    for folder in memory.folders():
        data = kept.read_manifest(memory, folder, manifests.MAX_BYTES)
        with contextlib.suppress(UnusableSnapshot):
            manifest = manifests.load(data or b"", folder)
            yield Candidate(manifest.name, manifest, usable=True)


def no_run(run: str, error: NothingToResume) -> NothingToResume:
    """What to say where the place called `run` holds no run: as `error`, or what was meant."""
    known, wanted = names.split_target(run)
    if wanted is None or not _is_run(known):
        return error
    at = f" --at {shlex.quote(wanted)}" if wanted else ""
    return NothingToResume(
        f"{error.message}; there is one at {known}",
        hint=f"trainckpt resume {shlex.quote(known)}{at}",
    )


def _is_run(run: str) -> bool:
    with contextlib.suppress(TrainckptError):  # nobody has asked for that one
        return attempts.run_id(place.open_place(run)) is not None
    return False
