"""What a command prints, passed on."""

from __future__ import annotations

import os

import pytest

from trainckpt.launcher.output_relay import OutputRelay


@pytest.mark.parametrize(("apart", "files"), [(False, 1), (True, 2)])
def test_both_outputs_reach_the_one_that_ours_are(tmp_path, apart, files):
    """One file, whose order is kept; two for a command that may have been launched with two."""
    here, there = os.pipe()
    logs = OutputRelay(tmp_path, out_to=there, err_to=there, apart=apart)
    assert [path.exists() for path in logs.paths] == [True] * files
    with logs.followed():
        os.write(logs.out, b"out ")
        os.write(logs.err, b"err ")
    logs.close()
    os.close(there)
    with os.fdopen(here, "rb") as reader:
        assert sorted(reader.read().split()) == [b"err", b"out"]
