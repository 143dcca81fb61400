"""Images hold every secret of their processes: to whom they are encrypted, where they may lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.attempt.rank_status import read_rank_statuses
from trainckpt.encryption.keys import RECIPIENT, must_be_there, parse_recipients, public_bytes
from trainckpt.format.dump import DumpName
from trainckpt.launcher import recorded_options
from trainckpt.process_dump.restore import load
from trainckpt.snapshot import attempt_history
from trainckpt.storage.fs_probe import file_system, is_remote

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.local import LocalTier


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
    claimed = [
        status for status in read_rank_statuses(folder).values() if status.attempt is not None
    ]
    texts = tuple(sorted({word for status in claimed for word in status.encrypt_to}))
    if not claimed:
        texts = recorded_options.read(record.facts).encrypt_to
    previous_recipients = _before(tier, record)
    if texts or previous_recipients:
        must_be_there()
    # A file of recipients lies where the command was launched, as the command has it.
    resolved = (text if text.startswith(RECIPIENT) else str(cwd / text) for text in texts)
    return tuple(dict.fromkeys([*parse_recipients(resolved), *previous_recipients]))


def _before(tier: LocalTier, record: AttemptRecord) -> list[str]:
    """To whom the dump is encrypted that this attempt goes on from, if it does."""
    name = DumpName.parse(record.parent or "")
    if name is None:
        return []
    parent_recipients = [
        key.to for key in load(tier, attempt_history.run_id(tier) or "", name).keys
    ]
    for recipient in parent_recipients:
        public_bytes(recipient)
    return parent_recipients


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
