"""DDP that is not the outermost wrapper keeps what it hides, too."""

from __future__ import annotations

import pytest

from tests.end_to_end import inner_ddp
from tests.ranks.processes import preload, run_in_turn

preload("tests.end_to_end.inner_ddp")


@pytest.mark.parametrize("wrap", sorted(inner_ddp.WRAPS))
def test_a_window_goes_on_as_it_would_have(tmp_path, wrap):
    """In it the next forward must not broadcast rank 0's buffers."""
    straight, _, resumed = run_in_turn(
        2,
        (inner_ddp.train, str(tmp_path / "straight"), wrap, 10),
        (inner_ddp.train, str(tmp_path / "run"), wrap, 7, 6),
        (inner_ddp.train, str(tmp_path / "run"), wrap, 10),
    )
    for (whole, _), (rest, at) in zip(straight, resumed, strict=True):
        assert at == 6
        assert rest == {number: whole[number] for number in range(6, 10)}
