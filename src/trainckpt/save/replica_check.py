"""Find the tensors with equal replicas on all ranks, from save to save of one attempt.

The first and the last save compare all bytes. Between them, large tensors that only steps change
are sampled, another part each time. A tensor found to differ counts as each rank's own until all
its bytes are compared again: the next sample may miss the difference.

The rank that reduces the answers decides for all ranks, also on the part to sample next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.snapshot.save_plan import equal_groups
from trainckpt.state import replicas

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.state.captured import Captured


class ReplicaCheck:
    """Compares the replicas of one rank with those of the others."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._number = 0  # of the comparison, of those that all ranks have made
        self._is_whole = True
        self._ever_equal: set[str] = set()  # groups, in some comparison
        self._different: set[str] = set()  # groups, since the last comparison of all bytes

    def report(self, captured: Captured, stepped: Collection[str], *, last: bool) -> dict[str, Any]:
        """Return this rank's contribution to `compare`.

        Args:
            captured: State of this rank.
            stepped: Tensors that only steps change.
            last: No save follows this one.
        """
        if self._world < 2:
            return {}
        self._is_whole = last or not self._number
        groups = replicas.group_digests(
            captured,
            self._rank,
            self._world,
            sampled=() if self._is_whole else stepped,
            number=self._number,
        )
        of_steps = sorted({captured.groups[name] for name in stepped if name in captured.groups})
        return {"groups": groups, "stepped": of_steps, "number": self._number}

    def equal_groups(self, verdict: Mapping[str, Any]) -> list[str]:
        """Return the groups that are equal on all ranks, given the result of `compare`."""
        if self._is_whole:
            self._different.clear()
        self._number = verdict["number"]
        self._warn(set(verdict["apart"]) - self._different)
        self._different.update(verdict["apart"])
        alike = [group for group in verdict["equal"] if group not in self._different]
        self._ever_equal.update(alike)
        return alike

    def _warn(self, differing: set[str]) -> None:
        for group in sorted(differing & self._ever_equal):
            if self._rank == 0:
                logger.warning(
                    "%s: the ranks' copies were equal and now differ; each rank saves its own",
                    replicas.kind_of(group),
                )


def verdict(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the groups of tensors with equal replicas, or why nothing can be saved. Pure."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    places = [answer["place"] for answer in answers]
    if any(place != places[0] for place in places):
        errors.append(f"the ranks are not at one boundary: {places[:16]}")
    result = {} if errors else compare(answers)
    behind = any(answer["behind"] for answer in answers)
    attempt = max(answer["attempt"] for answer in answers)  # a dump may fall between two ranks
    return {"error": "; ".join(errors), **result, "behind": behind, "attempt": attempt}


def compare(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the equal groups, and those that may no longer be sampled, from all answers. Pure.

    A rank without the result of the last comparison has sampled other parts. No group counts as
    equal then.
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
