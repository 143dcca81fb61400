"""The cursor, as JSON and in words."""

from __future__ import annotations

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.cursor import Cursor

CURSOR = Cursor(1, 12, 3, 7, 51, 204, 0)


def test_it_comes_back_as_it_was():
    assert Cursor.from_json(CURSOR.to_json()) == CURSOR


def test_it_reads_as_words():
    assert str(CURSOR) == "epoch 1 step 12 micro-batch 3"
    assert str(Cursor(1, 12, evaluations=2)) == "epoch 1 step 12 micro-batch 0, evaluation 2"


@pytest.mark.parametrize("bad", [None, [], {}, {**CURSOR.to_json(), "step": -1}])
@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_anything_else_is_refused(bad, value):
    with pytest.raises(UnusableSnapshot):
        Cursor.from_json(bad)
    with pytest.raises(UnusableSnapshot):
        Cursor.from_json({**CURSOR.to_json(), "epoch": value})
