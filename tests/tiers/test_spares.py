"""Spares: the file of a pruned snapshot is written over by the next, if nobody else has it."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from trainckpt.tiers.local import LocalTier

SIZE = 2 << 20


@pytest.fixture
def tier(tmp_path):
    return LocalTier(tmp_path / "run")


def write(tier, folder, content, size=SIZE):
    data = bytearray(content * (size // len(content) + 1))[:size]
    tier.write_parts(f"snapshots/{folder}/rank00000.safetensors", size, [(0, memoryview(data))])
    return tier.root / "snapshots" / folder / "rank00000.safetensors"


@pytest.mark.parametrize("size", [SIZE, SIZE - 5000, SIZE + 5000])
def test_the_next_file_is_written_over_it_whatever_its_length(tier, size):
    old = write(tier, "a", b"old")
    number = old.stat().st_ino
    tier.remove_folder("snapshots/a", reuse=True)
    assert not old.parent.exists()
    new = write(tier, "b", b"newer", size)
    assert new.stat().st_ino == number
    assert new.read_bytes() == (b"newer" * size)[:size]
    assert [path.name for path in (tier.root / "spares").iterdir()] == []


def test_one_of_each_name_is_kept_and_only_where_asked_for(tier):
    for folder in "abc":
        write(tier, folder, b"x")
    tier.remove_folder("snapshots/a")
    assert not (tier.root / "spares").exists()
    tier.remove_folder("snapshots/b", reuse=True)
    tier.remove_folder("snapshots/c", reuse=True)
    assert [path.name for path in (tier.root / "spares").iterdir()] == ["rank00000.safetensors"]
    assert [path.name for path in (tier.root / "snapshots").iterdir()] == []
    tier.clear_spares()
    assert not (tier.root / "spares").exists()
    tier.clear_spares()


def test_what_somebody_reads_or_has_kept_by_another_name_is_never_written_over(tier, tmp_path):
    read, kept = write(tier, "a", b"read"), write(tier, "b", b"kept")
    os.link(kept, tmp_path / "mine")
    with read.open("rb") as file:
        tier.remove_folder("snapshots/a", reuse=True)
        tier.remove_folder("snapshots/b", reuse=True)
        write(tier, "c", b"new")
        assert file.read() == (b"read" * SIZE)[:SIZE]
    assert (tmp_path / "mine").read_bytes() == (b"kept" * SIZE)[:SIZE]


@pytest.mark.parametrize("how", ["reads", "links"])
def test_what_somebody_comes_to_have_while_it_waits_is_not_written_over_either(tier, tmp_path, how):
    old = write(tier, "a", b"old")
    tier.remove_folder("snapshots/a", reuse=True)
    assert not old.exists()
    spare = tier.root / "spares" / old.name
    with spare.open("rb") if how == "reads" else nullcontext() as file:
        if how == "links":
            os.link(spare, tmp_path / "mine")
        new = write(tier, "b", b"new")
        found = file.read() if file else (tmp_path / "mine").read_bytes()
    assert found == (b"old" * SIZE)[:SIZE]
    assert new.read_bytes() == (b"new" * SIZE)[:SIZE]


def test_a_file_that_is_kept_in_its_folder_is_not_put_aside(tier):
    old = write(tier, "a", b"old")
    tier.remove_folder("snapshots/a", keep=["rank00000.safetensors"], reuse=True)
    write(tier, "b", b"new")
    assert old.read_bytes() == (b"old" * SIZE)[:SIZE]


def test_a_write_that_fails_leaves_no_file_and_no_spare(tier):
    write(tier, "a", b"old")
    tier.remove_folder("snapshots/a", reuse=True)

    def parts():
        yield 0, memoryview(bytearray(100))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tier.write_parts("snapshots/b/rank00000.safetensors", SIZE, parts())
    assert [path.name for path in (tier.root / "snapshots" / "b").iterdir()] == []
    assert [path.name for path in (tier.root / "spares").iterdir()] == []
