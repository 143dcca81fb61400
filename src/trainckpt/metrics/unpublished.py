"""The error of a place that does not take metrics; the publisher logs it, and training goes on."""

from __future__ import annotations


class MetricsUnpublished(Exception):
    """Metrics could not be published.

    Attributes:
        hint: What to do about it.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
