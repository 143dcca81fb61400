"""Cases of a parametrized test that only `make test-long` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def long(*cases: Any) -> list[Any]:
    """Mark each case as long; a tuple has a value for each of several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]


def long_unless(stays: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Mark the cases as long that need not stay, in the order in which they come."""
    return [one for case in cases for one in ([case] if stays(case) else long(case))]
