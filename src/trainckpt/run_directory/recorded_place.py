"""Recorded place of a run directory: was the run moved here from another one, or copied?

Each attempt records its run directory. If that directory is lost, the run can go on from its slower
tiers, but in another directory only if the user says so. A moved run goes on in its new directory,
while its recorded command and its process dumps name the former one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.run_directory import run_url
from trainckpt.storage.redact import redact_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Tier

PLACE = "where"  # in an attempt's record


def place_of(run_tier: Tier) -> str:
    """Return the run directory as stored in records: a whole path, or a URL without secrets."""
    is_url = "://" in run_tier.url
    return redact_text(run_tier.url) if is_url else os.path.abspath(run_tier.url)  # noqa: PTH100


def other_place(run_tier: Tier, records: Mapping[int, AttemptRecord]) -> str:
    """Return the newest recorded place, if it is another than this run directory; else ""."""
    places = [r.facts[PLACE] for _, r in sorted(records.items()) if PLACE in r.facts]
    # by its name alone: a look at a former place, on a dead mount, may hang
    is_here = not places or places[-1] == place_of(run_tier)
    return "" if is_here else str(places[-1])[:200]


def is_at(run_tier: Tier, run: str) -> bool:
    """Return True if `run`, a path or URL, names this run directory, also through links."""
    if run == place_of(run_tier):
        return True
    if any("://" in url and not url.startswith("file:") for url in (run, run_tier.url)):
        return False
    with contextlib.suppress(OSError, TrainckptError):
        return Path(run_url.open_tier_at(run).url).samefile(run_tier.url)
    return False


def must_not_name_former(run_tier: Tier, former: object, command: Sequence[str], cwd: str) -> None:
    """Refuse a recorded command that names the former place of a moved or copied run.

    The script would begin there at step 0, or continue the original.

    Args:
        run_tier, former: The run directory, and its recorded place.
        command, cwd: The recorded command, and its working directory.
    """
    if not isinstance(former, str) or is_at(run_tier, former):
        return
    words = [part for word in command for part in (word, word.partition("=")[2]) if part]
    paths = [os.path.join(cwd, os.path.expanduser(word)) for word in words]  # noqa: PTH111, PTH118
    # links are resolved, as far as a path is there
    if former in words or os.path.realpath(former) in map(os.path.realpath, paths):
        raise ConfigurationError(
            f"the recorded command of {run_tier.url} names {former}, where the run was: it would "
            "train there",
            hint=f"start the script again with {run_tier.url} as its run directory, and it "
            f"resumes; or let {former} be a link to it",
        )
