"""Exchange bytes between ranks, on a process group of our own.

Gloo, regardless of the training's backend: the bytes come from files and go to CPU memory. The
members alone make the group, over the attempt's store, and torch.distributed does not list it: the
numbering and the collectives of the training's groups are unaffected.

Threads: one. Foreign errors leave as `NoAgreement`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import NoAgreement
from trainckpt.ranks.store import own_connection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.ranks.store import RankStore

    Message = tuple[int, int, memoryview]
    Under = tuple[Any, Any]  # the work handle, and the tensor that keeps its memory

CONNECT_S = 60.0  # for all members to have found each other


def is_there() -> bool:
    """Return True if this torch supports the exchange."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_gloo_available()
        and hasattr(torch.distributed, "ProcessGroupGloo")
    )


class Exchange:
    """One member's side of a group: point to point, each call in turn on every member.

    Attributes:
        timeout_s: Seconds `settle` waits for each message.
    """

    def __init__(
        self, channel: RankStore, key: str, members: Sequence[int], timeout_s: float
    ) -> None:
        """Make the group; returns once all members have called it.

        Args:
            channel: Of all ranks.
            key: Names this group on the channel; used once.
            members: Ranks, in one order on all of them; this rank is one.
            timeout_s: As the attribute.

        Raises:
            NoAgreement: a member did not come, or cannot be reached.
        """
        self._members, self._me = tuple(members), members.index(channel.world.rank)
        self.timeout_s = timeout_s
        c10d: Any = torch.distributed
        try:
            store = c10d.PrefixStore(channel.full(key), own_connection(channel.torch_store))
            within = timedelta(seconds=min(timeout_s, CONNECT_S))
            self._group = c10d.ProcessGroupGloo(store, self._me, len(members), within)
        except (RuntimeError, ValueError) as error:
            raise self._gone(f"could not reach ranks {list(members)[:20]}", error) from error

    def begin(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Under]:
        """Start messages: (index among the members, tag, memory); empty messages are skipped.

        Two members use the same tags, and equal lengths for each message. No memory may be touched
        before `settle` has returned.

        Raises:
            NoAgreement: a member is gone.
        """
        begun: list[Under] = []
        try:
            for call, messages in (("recv", receives), ("send", sends)):
                for place, tag, data in messages:
                    if len(data):
                        tensor = torch.frombuffer(data, dtype=torch.uint8)
                        begun.append((getattr(self._group, call)([tensor], place, tag), tensor))
        except (RuntimeError, AttributeError) as error:
            raise self._gone("could not send to its members", error) from error
        return begun

    def settle(self, begun: Sequence[Under]) -> None:
        """Return once those messages have passed.

        Raises:
            NoAgreement: a member is gone, or did not do its part in time; the group is of no use
                any more.
        """
        try:
            for work, _ in begun:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self._gone(f"lost one of {list(self._members)[:20]}", error) from error

    def close(self) -> None:
        """Leave the group: members still waiting for this one get an error at once."""
        self._group = None

    def _gone(self, what: str, error: Exception) -> NoAgreement:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return NoAgreement(
            f"rank {self._members[self._me]} {what} ({first_line[-200:]})",
            hint="see how that rank ended; GLOO_SOCKET_IFNAME names the network between hosts",
        )
