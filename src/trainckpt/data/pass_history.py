"""Compare the passes after a resume with those before it.

The history holds the length of the passes that ran out one after another, and the last one's order
if index lists are known. A length is expected if `len()` was right for each of them; or, to within
a tenth, if two had the same. A pass of another length, or in the order of the one before it, is a
fault of the resume.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

_ENOUGH = 2  # passes that agree, where nothing but chance may be why one does
_TENTH = 10
_FEW = 6  # fewer batches may come in the same order again by chance


@dataclass(frozen=True)
class PassHistory:
    """The passes that ran out since the run began, or since a pass was left early.

    Attributes:
        count: Number of these passes.
        length: Batches in each of them; None if they differ.
        announced: Batches in the running pass by `len()` as it began; None without a length.
        len_held: `announced` was right for each pass.
        order: Digest of the last pass's index lists; empty if they are unknown.
        orders_differ: No pass had the order of the one before it.
    """

    count: int = 0
    length: int | None = None
    announced: int | None = None
    len_held: bool = True
    order: bytes = b""
    orders_differ: bool = True

    @property
    def expected(self) -> int | None:
        """Number of batches expected in the running pass; None if unknown."""
        if self.count and self.len_held:
            return self.announced
        return self.length if self.count >= _ENOUGH else None

    def begin(self, announced: int | None) -> PassHistory:
        """Return the history at the beginning of a pass."""
        return replace(self, announced=announced)

    def add(self, batches: int, order: bytes) -> PassHistory:
        """Return the history with the running pass, now run out."""
        return PassHistory(
            count=self.count + 1,
            length=batches if self.count == 0 or self.length == batches else None,
            announced=None,
            len_held=self.len_held and self.announced == batches,
            order=order,
            orders_differ=self.orders_differ and order != self.order,
        )

    def fault(self, batches: int, order: bytes) -> str:
        """Return the fault of the running pass, now run out; empty if there is none.

        Example: "ended after 2 batches, where 6 were expected (as in each of the 3 passes before)".
        """
        expected = self.expected
        if expected is not None and abs(batches - expected) > self._slack:
            return (
                f"ended after {batches} batches, where {expected} were expected ({self._basis()})"
            )
        alike = self.count >= _ENOUGH and self.length == batches >= _FEW
        if alike and self.orders_differ and order == self.order:
            return f"had its {batches} batches in the order of the pass before; orders had differed"
        return ""

    def excess(self, batches: int) -> str:
        """Return the fault of a pass with this many batches so far; empty if there is none."""
        expected = self.expected
        if expected is None or batches <= expected + self._slack:
            return ""
        return f"has a batch {batches}, where {expected} were expected ({self._basis()})"

    @property
    def _slack(self) -> int:
        # Filtered or packed streams have passes of about one length; some agree by chance.
        return 0 if self.len_held else (self.length or 0) // _TENTH

    def _basis(self) -> str:
        if self.len_held:
            return "by len(), which had been right"
        return f"as in each of the {self.count} passes before"


def announced(facts: dict[str, Any]) -> int | None:
    """Return the batches of a pass by `len()`, from a loader's facts; None without a length."""
    batches: int | None = facts.get("length", facts.get("sampler length"))
    samples: int | None = facts.get("dataset length")
    size: int | None = facts.get("batch_size")
    if batches is not None or samples is None or not size:
        return samples if batches is None else batches
    return samples // size if facts["drop_last"] else -(-samples // size)
