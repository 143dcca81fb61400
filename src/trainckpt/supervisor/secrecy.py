"""Images hold every secret of their processes: to whom they are encrypted, where they may lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.encryption.keys import parse_recipients
from trainckpt.encryption.package import must_be_there
from trainckpt.lifecycle.told import read_told
from trainckpt.tiers.capabilities import file_system, is_remote

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.tiers.local import LocalTier


def recipients(folder: Path) -> tuple[str, ...]:
    """To whom the ranks of a launch encrypt; of those that do not say, what the options say here.

    Args:
        folder: The supervisor's.

    Raises:
        ConfigurationError: an option is unreadable, or the package is missing.
    """
    claimed = [told for told in read_told(folder).values() if told.attempt is not None]
    words = tuple(sorted({word for told in claimed for word in told.encrypt_to}))
    if not claimed:
        from trainckpt.lifecycle.options import read_options

        words = read_options({}).encrypt_to
    if words:
        must_be_there()
    return parse_recipients(words)


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
