"""Share one link's bandwidth between the transfers under way, in simulated time.

Each transfer gets an equal share, or less where its own end is slower; what it leaves goes to the
others. Shares change when a transfer begins, ends or is abandoned, and when the link fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import simpy
    from simpy.events import Event

ROUNDING_S = 1e-6  # what takes less has ended: clocks of some months are not more exact


@dataclass(eq=False)
class Transfer:
    """Bytes on their way.

    Attributes:
        left_bytes: Still to go.
        most_bytes_per_s: Bandwidth of its own end.
        done: The event of its end; an abandoned transfer has none.
        bytes_per_s: Its share now.
    """

    left_bytes: float
    most_bytes_per_s: float
    done: Event
    bytes_per_s: float = 0.0


class SharedLink:
    """A link, such as the way to a store."""

    def __init__(self, env: simpy.Environment, bytes_per_s: float) -> None:
        self._env = env
        self._bytes_per_s = bytes_per_s
        self._transfers: list[Transfer] = []
        self._failures = 0  # under way
        self._changed_s = 0.0
        self._version = 0

    def begin(self, num_bytes: float, most_bytes_per_s: float) -> Transfer:
        """Begin a transfer; wait for its `done`."""
        self._settle()
        transfer = Transfer(num_bytes, most_bytes_per_s, self._env.event())
        self._transfers.append(transfer)
        self._share()
        return transfer

    def abandon(self, transfer: Transfer) -> None:
        """Stop a transfer, if it has not ended."""
        if transfer in self._transfers:
            self._settle()
            self._transfers.remove(transfer)
            self._share()

    def fail(self) -> None:
        """Move nothing until as many calls of `recover`."""
        self._settle()
        self._failures += 1
        self._share()

    def recover(self) -> None:
        """End one failure."""
        self._settle()
        self._failures -= 1
        self._share()

    def _settle(self) -> None:
        """Count what was moved since the last change."""
        elapsed_s = self._env.now - self._changed_s
        self._changed_s = self._env.now
        for transfer in self._transfers:
            transfer.left_bytes -= elapsed_s * transfer.bytes_per_s

    def _share(self) -> None:
        """Share the bandwidth anew, and wake up at the next end of a transfer."""
        self._version += 1
        left_bytes_per_s = 0.0 if self._failures else self._bytes_per_s
        waiting = sorted(self._transfers, key=lambda each: each.most_bytes_per_s)
        for number, transfer in enumerate(waiting):
            fair = left_bytes_per_s / (len(waiting) - number)
            transfer.bytes_per_s = min(fair, transfer.most_bytes_per_s)
            left_bytes_per_s -= transfer.bytes_per_s
        ends = [t.left_bytes / t.bytes_per_s for t in self._transfers if t.bytes_per_s]
        if ends:
            timeout = self._env.timeout(max(0.0, min(ends)), self._version)
            assert timeout.callbacks is not None
            timeout.callbacks.append(self._wake)

    def _wake(self, event: Event) -> None:
        if event.value != self._version:  # something has changed since
            return
        self._settle()
        ended = [t for t in self._transfers if t.left_bytes <= ROUNDING_S * t.bytes_per_s]
        self._transfers = [each for each in self._transfers if each not in ended]
        self._share()
        for transfer in ended:
            transfer.done.succeed()
