"""Comparing: which tensors all ranks hold alike, from save to save of one attempt.

The first comparison and that of the last save are of all bytes; between them large tensors that
only steps change are sampled, another part each time. What was found to differ is each rank's own
until all its bytes are compared again: the next sample may not reach what differs.

Whoever folds the answers decides for all ranks, also which part is looked at next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot.save_plan import equal_groups
from trainckpt.state import replicas

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.state.captured import Captured


class Comparing:
    """Of one rank."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._number = 0  # of the comparison, of those that all ranks have made
        self._is_whole = True
        self._alike: set[str] = set()  # groups, in some comparison
        self._apart: set[str] = set()  # groups, since the last comparison of all bytes

    def answer(self, captured: Captured, stepped: Collection[str], *, last: bool) -> dict[str, Any]:
        """What this rank brings to the others, for `compare`.

        Args:
            captured: Its state.
            stepped: Tensors that only steps change.
            last: Nothing follows this save.
        """
        if self._world < 2:
            return {}
        self._is_whole = last or not self._number
        groups = replicas.group_digests(
            captured, self._rank, self._world,
            sampled=() if self._is_whole else stepped, number=self._number,
        )  # fmt: skip
        of_steps = sorted({captured.groups[name] for name in stepped if name in captured.groups})
        return {"groups": groups, "stepped": of_steps, "number": self._number}

    def alike(self, verdict: Mapping[str, Any]) -> list[str]:
        """Groups that are alike on all ranks, as `compare` has found."""
        if self._is_whole:
            self._apart.clear()
        self._number = verdict["number"]
        self._say(set(verdict["apart"]) - self._apart)
        self._apart.update(verdict["apart"])
        alike = [group for group in verdict["equal"] if group not in self._apart]
        self._alike.update(alike)
        return alike

    def _say(self, differing: set[str]) -> None:
        for group in sorted(differing & self._alike):
            if self._rank == 0:
                logger.warning(
                    "%s: the ranks held this alike, and do not any more; each rank's own is saved "
                    "from now on", replicas.kind_of(group),
                )  # fmt: skip


def verdict(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Which groups of tensors are equal on their replicas, or why nothing can be saved. Pure."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    places = [answer["place"] for answer in answers]
    if any(place != places[0] for place in places):
        errors.append(f"the ranks are not at one boundary: {places[:16]}")
    found = {} if errors else compare(answers)
    behind = any(answer["behind"] for answer in answers)
    attempt = max(answer["attempt"] for answer in answers)  # a dump may fall between two ranks
    return {"error": "; ".join(errors), **found, "behind": behind, "attempt": attempt}


def compare(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By all ranks' answers: which groups are equal, and which may no longer be sampled. Pure.

    A rank that does not know what the last comparison came to looked at other parts: then nothing
    is known of any group.
    """
    numbers = [answer.get("number", 0) for answer in answers]
    equal: list[str] = []
    apart: list[str] = []
    if len(set(numbers)) == 1:
        reports = [answer.get("groups", {}) for answer in answers]
        equal = equal_groups(reports)
        stepped = {kind for answer in answers for kind in answer.get("stepped", ())}
        differing = {group for report in reports for group in report} - set(equal)
        apart = sorted(group for group in differing if replicas.kind_of(group) in stepped)
    return {"equal": equal, "apart": apart, "number": max(numbers) + 1}
