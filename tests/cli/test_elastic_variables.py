"""`trainckpt run --nnodes 1:4` sets what its ranks need, unless it is set already."""

from __future__ import annotations

import pytest

from trainckpt.cli.run import elastic_variables

SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.mark.parametrize(
    ("variable", "line", "grace"),
    [
        (None, "", "30 s"),
        ("20 s", "", "20 s"),
        (None, 'grace = "10 s"', None),  # no variable, or the file would not count
        ("20 s", 'grace = "10 s"', "20 s"),
        (None, "grace = [", "30 s"),  # refused by the ranks
    ],
)
def test_a_grace_of_the_user_stands(tmp_path, monkeypatch, variable, line, grace):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAINCKPT_GRACE", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRAINCKPT_GRACE", variable)
    (tmp_path / "trainckpt.toml").write_text(line)
    found = elastic_variables()
    assert found.get("TRAINCKPT_GRACE") == grace
    assert found[SHARED] == "1"
