"""Haste: some rank's training waits for a save, so no rank holds it back for a proof.

A proof of what was copied beside training waits for the next step (`state/overlap.py`). Where one
rank waits for the save, the others may wait for that rank in the middle of their step: the proof is
then made at once, beside a training that stands.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement
from trainckpt.lifecycle.saving import save_keys

if TYPE_CHECKING:
    from trainckpt.ranks.channel import Channel


class Haste:
    """Of one rank.

    Args:
        channel: Of the training thread.
        background: Of the saving thread and of who works for it.
    """

    def __init__(self, channel: Channel, background: Channel) -> None:
        self._channel, self._background = channel, background
        self._asked = 0  # for which save this rank has

    def ask(self, sequence: int) -> None:
        """Training waits for this save from now on. Training thread."""
        if self._channel.world.size > 1 and self._asked != sequence:
            self._asked = sequence
            with contextlib.suppress(NoAgreement):  # whoever holds it back ends without it too
                self._channel.put(save_keys.haste(sequence), True)

    def is_asked(self, sequence: int) -> bool:
        """Whether any rank's does. Whoever copies for the saving thread, which waits meanwhile."""
        if self._channel.world.size == 1:
            return False
        with contextlib.suppress(NoAgreement):
            return self._background.peek(save_keys.haste(sequence)) is not None
        return False

    def is_over(self) -> None:
        """All ranks are through with the save that this one asked for. Training thread."""
        if self._asked:
            with contextlib.suppress(NoAgreement):
                self._channel.forget([save_keys.haste(self._asked)])
            self._asked = 0
