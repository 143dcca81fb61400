"""What to say of a place that holds no run: what was meant, as far as that can be seen there."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

from trainckpt.errors import NothingToResume
from trainckpt.format import names
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.tiers.base import Tier

MOST_RUNS = 10  # that are listed
DEEPEST = 4  # run, folder of snapshots, snapshot, file


def no_run_at(tier: Tier, before: str = "") -> NothingToResume:
    """The error for a place without a run: of a folder that holds runs, or lies in one, it says so.

    Args:
        tier: The place.
        before: Words that come first.
    """
    said = f"{before}there is no run at {tier.url}"
    if not isinstance(tier, LocalTier):
        return NothingToResume(said, hint="check the path")
    if held := _runs_in(tier.root):
        listed = ", ".join(held[:MOST_RUNS])
        more = f" and {len(held) - MOST_RUNS} more" if len(held) > MOST_RUNS else ""
        one = shlex.quote(str(tier.root / held[0])) if len(held) == 1 else f"{tier.root}/<name>"
        return NothingToResume(
            f"{said}: it is a folder that holds runs: {listed}{more}", hint=f"name one: {one}"
        )
    if (run := _run_around(tier.root)) is not None:
        return NothingToResume(
            f"{said}: it is in the run {run}", hint=f"name that: {shlex.quote(str(run))}"
        )
    return NothingToResume(said, hint="check the path")


def _runs_in(folder: Path) -> list[str]:
    """Names of the runs whose places lie there, as far as this user may see them."""
    found = []
    with contextlib.suppress(OSError):
        for each in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):  # a closed one says nothing of the others
                if (each / names.RUN_RECORD).is_file():
                    found.append(each.name)
    return found


def _run_around(place: Path) -> Path | None:
    for folder in list(place.parents)[:DEEPEST]:
        with contextlib.suppress(OSError):
            if (folder / names.RUN_RECORD).is_file():
                return folder
    return None
