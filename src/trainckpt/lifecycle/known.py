"""What a script may ask its Checkpointer: where the run is, and how this attempt began."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainckpt.format.cursor import Cursor
    from trainckpt.lifecycle.attempt import Attempt
    from trainckpt.lifecycle.run.position import Position
    from trainckpt.lifecycle.run.slips import Slips


class Known:
    """The public attributes of a Checkpointer."""

    _attempt: Attempt | None
    _position: Position
    _slips: Slips

    @property
    def cursor(self) -> Cursor:
        """Where the run is; inside the loop, of the micro-batch being trained."""
        self._slips.knows_epoch = True
        return self._position.cursor

    @property
    def resumed_from(self) -> Cursor | None:
        """The cursor this attempt went on from, or None if it began at step 0."""
        self._slips.knows_epoch = True
        return self._attempt.resumed_from if self._attempt else None

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1."""
        return self._must_have_resumed().number

    def _must_have_resumed(self) -> Attempt:
        raise NotImplementedError
