"""A disk that is full, read-only, closed or gone: saves fail and say so, training goes on."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.faults import programs

ROOT = os.geteuid() == 0


@pytest.fixture
def place(tmp_path_factory):
    """A folder that an unprivileged user owns and can get to."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        if ROOT:
            os.chown(folder, programs.NOBODY, programs.NOBODY)
        yield Path(folder)


def check(ended, words):
    """Saves 4 to 7 failed for that reason, all others committed."""
    assert isinstance(ended, list), ended[1]
    failed = [line for line in ended if line.startswith("failed: ")]
    assert [i for i, line in enumerate(ended) if line in failed] == [4, 5, 6, 7], ended
    assert all(words in line for line in failed), failed
    assert len(ended) == 11


@pytest.mark.skipif(not ROOT, reason="mounting a small tmpfs needs root")
def test_on_a_full_disk_saves_fail_until_there_is_space_again(server, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        check(programs.run(server, "on_a_full_disk", tmp_path), "No space left on device")
        left = {p.name for p in (tmp_path / "run" / "snapshots").rglob("*")}
        assert len([name for name in left if name.startswith("rank")]) == 1
        assert len([name for name in left if name.startswith("s")]) == 3, left
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_under_a_file_size_limit_saves_fail_until_it_is_lifted(server, place):
    ended = programs.run(server, "under_a_file_size_limit", place / "run")
    check(ended, "File too large")
    assert len(list((place / "run" / "snapshots").iterdir())) == 3


def test_in_a_place_turned_read_only_saves_fail_until_it_can_be_written_again(server, place):
    ended = programs.run(server, "in_a_place_turned_read_only", place / "run", as_nobody=ROOT)
    check(ended, "Permission denied")


def test_in_a_place_that_vanished_saves_fail_until_it_is_back(server, place):
    check(programs.run(server, "in_a_place_that_vanishes", place / "run"), "is gone")
    assert not (place / "away").exists()


def test_a_place_without_permission_is_69_and_never_an_empty_run(server, place):
    found = programs.run(server, "in_a_place_that_is_closed", place / "run", as_nobody=ROOT)
    assert isinstance(found, list), found[1]
    assert len(found) == 4
    for code, message, hint in found:
        assert code == 69, message
        assert "Permission denied" in message
        assert f"chmod -R u+rwX {place}/run" in hint or "readable again" in hint
