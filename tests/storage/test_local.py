"""The local tier: its contract, its modes, its refusals."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import pytest

from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.storage.local import MOST_FOLDERS, Disk, LocalTier


@pytest.fixture
def tier(tmp_path):
    return LocalTier(tmp_path / "a" / "run")


def blocks(*parts):
    return [memoryview(part) for part in parts]


def test_what_was_written_is_read(tier):
    tier.write("x/y", blocks(b"one", b"", b"two"))
    assert tier.read("x/y", max_bytes=6) == b"onetwo"
    assert (tier.size("x/y"), tier.list("x"), tier.list("")) == (6, ["y"], ["x"])
    into = bytearray(2)
    tier.read_into("x/y", 3, memoryview(into))
    assert into == b"tw"


def test_a_key_is_written_once_and_replaced_whole(tier):
    tier.write("k", blocks(b"old"))
    with pytest.raises(TierUnavailable):
        tier.write("k", blocks(b"new"))
    assert tier.read("k", max_bytes=9) == b"old"
    tier.replace("k", b"newer")
    assert tier.read("k", max_bytes=9) == b"newer"


@pytest.mark.parametrize("folder", ["", "attempts"])
def test_what_killed_writers_have_left_is_removed_once_it_is_old(tier, folder):
    for key, age_s in (
        ("1.json", 900),
        (".tmp-old", 601),
        (".tmp-new", 599),
        ("2.json", 0),
        ("ahead", -3600),
    ):
        at_s = 2e9 - age_s
        tier.replace(f"{folder}/{key}".lstrip("/"), b"x")
        os.utime(tier.root / folder / key, (at_s, at_s))
    fresh = f"{folder}/2.json".lstrip("/")
    tier.remove_stale(folder, fresh)
    tier.remove_stale("nothing here", fresh)
    left = sorted(path.name for path in (tier.root / folder).iterdir())
    assert left == [".tmp-new", "1.json", "2.json", "ahead"]


def test_one_of_many_creators_wins(tier):
    barrier, won = threading.Barrier(8), []

    def create(number):
        barrier.wait()
        if tier.create("claims/1", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert tier.read("claims/1", max_bytes=9) == b"%d" % won[0]
    assert tier.list("claims") == ["1"]


def test_without_hard_links_one_creator_wins_too(tmp_path):
    class NoLinks(Disk):
        def link(self, source, target):
            raise OSError(errno.ENOTSUP, "no links here")

    tier = LocalTier(tmp_path, NoLinks())
    assert [tier.create("k", b"1"), tier.create("k", b"2")] == [True, False]
    assert tier.read("k", max_bytes=1) == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["k"]


def test_what_is_absent_is_absent(tier):
    assert tier.size("k") is None
    assert tier.list("folder") == []
    tier.remove("k")
    tier.remove_folder("folder")
    with pytest.raises(UnusableSnapshot, match="missing"):
        tier.read("k", max_bytes=1)


def test_what_is_removed_is_gone(tier):
    tier.write("f/k", blocks(b"1"))
    tier.write("f/l", blocks(b"2"))
    tier.remove("f/k")
    assert tier.list("f") == ["l"]
    tier.remove_folder("f")
    assert tier.list("") == []


def test_reading_never_goes_beyond_what_was_asked_or_what_is_there(tier):
    tier.write("k", blocks(b"1234"))
    with pytest.raises(UnusableSnapshot, match="more than 3"):
        tier.read("k", max_bytes=3)
    with pytest.raises(UnusableSnapshot, match="too early"):
        tier.read_into("k", 2, memoryview(bytearray(3)))


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\0"])
def test_a_key_cannot_leave_the_place(tier, key):
    for act in (tier.size, tier.list, tier.remove, lambda k: tier.replace(k, b"")):
        with pytest.raises(UnusableSnapshot, match="leaves the run directory"):
            act(key)


def test_files_are_0600_and_folders_0700_whatever_the_umask(tier, tmp_path):
    before = os.umask(0)
    try:
        tier.write("f/k", blocks(b"1"))
        tier.replace("f/r", b"1")
        tier.create("g/c", b"1")
    finally:
        os.umask(before)
    modes = {p.relative_to(tmp_path): p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    files = {str(p) for p, mode in modes.items() if mode == 0o600}
    assert files == {"a/run/f/k", "a/run/f/r", "a/run/g/c"}
    assert {mode for p, mode in modes.items() if str(p) not in files} == {0o700}


def test_no_temporary_file_is_left_or_listed(tier, tmp_path):
    class Full(Disk):
        def write(self, path, descriptor, block, first_byte):
            raise OSError(errno.ENOSPC, "full")

    tier.create("k", b"1")
    tier.create("k", b"2")
    full = LocalTier(tier.root, Full())
    for act in (full.replace, full.create):
        with pytest.raises(TierUnavailable, match="full") as caught:
            act("l", b"1")
        assert "free space" in caught.value.hint
    with pytest.raises(TierUnavailable):
        full.write("m", blocks(b"1"))
    assert [p.name for p in tier.root.iterdir()] == ["k"]
    (tier.root / ".tmp-left-over").touch()
    assert tier.list("") == ["k"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EROFS, errno.ESTALE])
def test_whatever_the_system_refuses_is_an_error_of_the_tier(tmp_path, number):
    class Refusing(Disk):
        def create(self, path):
            raise OSError(number, os.strerror(number))

    with pytest.raises(TierUnavailable, match=os.strerror(number)):
        LocalTier(tmp_path, Refusing()).write("k", blocks(b"1"))


def test_a_symbolic_link_in_the_place_of_a_new_file_is_not_followed(tier, tmp_path):
    tier.write("f/k", blocks(b"1"))
    victim = tmp_path / "victim"
    (tier.root / "f" / "evil").symlink_to(victim)
    with pytest.raises(TierUnavailable):
        tier.write("f/evil", blocks(b"1"))
    assert not victim.exists()


@pytest.mark.parametrize("place", ["link", "link/run", "link/deep/run"])
def test_a_place_below_a_link_that_leads_nowhere_is_unavailable_and_the_link_is_named(
    tmp_path, place
):
    """As one to a volume that is not mounted. Here the link is one to another link."""
    (tmp_path / "other").symlink_to("not-mounted")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    tier = LocalTier(tmp_path / place)
    leads = f"{tmp_path}/link is a link to {tmp_path}/not-mounted, which does not exist"
    for act in (
        lambda: tier.write("f/k", blocks(b"1")),
        lambda: tier.create("k", b"1"),
        lambda: tier.replace("k", b"1"),
        lambda: tier.make_folder("f"),
    ):
        with pytest.raises(TierUnavailable, match=leads) as caught:
            act()
        assert f"mount the file system of {tmp_path}/not-mounted" in caught.value.hint
    with pytest.raises(UnusableSnapshot, match="missing"):
        tier.read("k", max_bytes=1)


def test_a_folder_that_cannot_be_made_is_unavailable_with_what_to_do(tmp_path):
    class NoFolders(Disk):
        def make_folder(self, path):
            raise OSError(errno.ENOENT, "No such file or directory")

    with pytest.raises(TierUnavailable, match="its folder is missing") as caught:
        LocalTier(tmp_path / "a", NoFolders()).create("k", b"1")
    assert "or name another directory" in caught.value.hint


def test_a_file_where_a_folder_should_be_is_an_error_and_not_an_empty_list(tier):
    tier.write("k", blocks(b"1"))
    with pytest.raises(TierUnavailable):
        tier.list("k")
    assert tier.size("k/l") is None


def test_what_is_remembered_of_folders_does_not_grow_with_their_number(tmp_path):
    tier = LocalTier(tmp_path)
    for number in range(2 * MOST_FOLDERS):
        tier.write(f"snapshots/{number}/file", [memoryview(b"x")])
    assert len(tier._durable) <= MOST_FOLDERS


class Pruned(Disk):
    """A disk where another process removes a folder before its first file is created."""

    def create(self, path):
        shutil.rmtree(path.parent)
        return super().create(path)


class NotExclusive(Disk):
    """A file system that creates no file exclusively."""

    def create(self, path):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize(
    ("disk", "why", "hint"),
    [
        (Pruned(), "another process removed its folder meanwhile", "was started twice"),
        (NotExclusive(), "Invalid argument", "exclusive creation (O_EXCL)"),
    ],
)
def test_a_write_that_fails_names_its_cause_and_a_cure(tmp_path, disk, why, hint):
    tier = LocalTier(tmp_path, disk)
    with pytest.raises(TierUnavailable, match=why) as error:
        tier.write("snapshots/s1~1.1/rank00000.safetensors", blocks(b"data"))
    assert hint in error.value.hint
