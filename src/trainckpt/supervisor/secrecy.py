"""Images hold every secret of their processes: to whom they are encrypted, where they may lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.encryption.keys import RECIPIENT, parse_recipients, public_bytes
from trainckpt.encryption.package import must_be_there
from trainckpt.format.dump import DumpName
from trainckpt.lifecycle.run.told import read_told
from trainckpt.process_dump.restore import load
from trainckpt.snapshot import attempts
from trainckpt.supervisor import recorded_options
from trainckpt.tiers.capabilities import file_system, is_remote

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.local import LocalTier


def recipients(folder: Path, tier: LocalTier, record: AttemptRecord) -> tuple[str, ...]:
    """To whom the ranks of a launch encrypt; of those that do not say, what the options say.

    And to whom the dump is encrypted that they were brought back from: secrets that it kept do not
    get into the clear because whoever brought it back had other options.

    Args:
        folder: The supervisor's.
        tier: The run's place.
        record: Of the attempt.

    Raises:
        ConfigurationError: an option is unreadable, or the package is missing.
        UnusableSnapshot, TierUnavailable: to whom that dump is encrypted cannot be read.
    """
    cwd = recorded_options.folder(record.facts)
    claimed = [told for told in read_told(folder).values() if told.attempt is not None]
    words = tuple(sorted({word for told in claimed for word in told.encrypt_to}))
    if not claimed:
        words = recorded_options.read(record.facts).encrypt_to
    before = _before(tier, record)
    if words or before:
        must_be_there()
    # A file of recipients lies where the command was launched, as the command has it.
    found = (w if w.startswith(RECIPIENT) else str(cwd / w) for w in words)
    return tuple(dict.fromkeys([*parse_recipients(found), *before]))


def _before(tier: LocalTier, record: AttemptRecord) -> list[str]:
    """To whom the dump is encrypted that this attempt goes on from, if it does."""
    name = DumpName.parse(record.parent or "")
    if name is None:
        return []
    found = [key.to for key in load(tier, attempts.run_id(tier) or "", name).keys]
    for each in found:
        public_bytes(each)
    return found


def why_exposed(tier: LocalTier) -> str:
    """Why images must not be written to the run's place, or "".

    CRIU writes them in the clear, and what was on a network once cannot be called back.
    """
    kind = file_system(tier.root)
    if not is_remote(kind):
        return ""
    return (
        f"the run's place is on {kind}, and images, in the clear at first, would leave this host; "
        "put it on a disk of this host, and name that directory as one of its tiers"
    )
