"""Names of snapshots, files, tags and targets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format.names import SnapshotName, check_file_name, check_tag, split_target

COUNTS = st.integers(0, 10**9 - 1)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_a_name_spelled_is_a_name_parsed(attempt, sequence, step, micro):
    name = SnapshotName(attempt, sequence, step, micro)
    assert SnapshotName.parse(str(name)) == name


def test_the_example_of_the_docstring_holds():
    assert str(SnapshotName(attempt=2, sequence=7, step=1200, micro=3)) == "s1200m3~2.7"


def test_names_sort_in_the_order_of_commits():
    later_attempt, later_sequence = SnapshotName(2, 1, 5, 0), SnapshotName(1, 9, 80, 0)
    assert later_attempt > later_sequence > SnapshotName(1, 8, 90, 0)


@pytest.mark.parametrize("text", ["", "s1", "s1~1", "s1~1.x", "x1~1.1", "s1~1.1/..", "s1~1.1\n"])
def test_anything_else_is_no_name(text):
    assert SnapshotName.parse(text) is None


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\\b", "a\0", "../a", "x" * 256, 3])
def test_a_file_name_cannot_leave_its_folder(name):
    with pytest.raises(UnusableSnapshot):
        check_file_name(name)


@pytest.mark.parametrize("tag", ["", "latest", "s12", "s12m3", "a/b", ".a", "a b", "ä", "x" * 65])
def test_a_tag_cannot_be_taken_for_something_else(tag):
    with pytest.raises(ConfigurationError):
        check_tag(tag)


def test_a_good_tag_is_a_tag():
    assert check_tag("best-2.1_x") == "best-2.1_x"


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("runs/x", ("runs/x", None)),
        ("runs/x@s3", ("runs/x", "s3")),
        ("user@host/x", ("user@host/x", None)),
        ("user@host/x@best", ("user@host/x", "best")),
        ("@s3", ("@s3", None)),
    ],
)
def test_a_target_is_a_run_and_maybe_a_snapshot(target, parts):
    assert split_target(target) == parts
