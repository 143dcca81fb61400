"""Archives of a folder: what comes back, and what is refused before it is unpacked."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import pytest

from trainckpt import UnusableSnapshot
from trainckpt.storage import folder_archive
from trainckpt.storage.folder_archive import digest_of, list_files, pack, unpack

FILES = {"inductor/ab/kernel.so": b"\x7fELF code", "inductor/fxgraph/x/y/entry": b"graph", "a": b""}


@pytest.fixture
def folder(tmp_path):
    """A folder with some files."""
    for name, data in FILES.items():
        path = tmp_path / "full" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (1e9, 1e9))
    return tmp_path / "full"


def contents(folder):
    return {name: (folder / name).read_bytes() for name in list_files(folder)}


def archive_of(tmp_path, *members):
    """An archive with these members: (tar header, data)."""
    path = tmp_path / "made.tar.gz"
    with gzip.open(path, "wb") as plain, tarfile.open(fileobj=plain, mode="w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path, digest_of(path)


def test_a_folder_comes_back_with_its_times_and_closed_to_others(folder, tmp_path):
    packed = pack(folder, list_files(folder), tmp_path / "archive")
    unpack(tmp_path / "archive", packed, tmp_path / "back")
    assert contents(tmp_path / "back") == FILES
    for name in FILES:
        assert (tmp_path / "back" / name).stat().st_mtime == 1e9
        assert (tmp_path / "back" / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o700
    assert packed == digest_of(tmp_path / "archive")


def test_the_same_files_have_the_same_digest(folder, tmp_path):
    first, second = (
        pack(folder, list_files(folder), tmp_path / name) for name in ("first", "second")
    )
    assert first == second


def test_locks_temporary_files_and_links_are_left_out(folder, tmp_path):
    for name in ("locks/a", "inductor/.1.2.tmp", "inductor/a.lock", "triton/tmp.pid_1/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"passing")
    (folder / "link").symlink_to("/etc/passwd")
    assert list_files(folder).keys() == FILES.keys()


@pytest.mark.parametrize("at", [0, 20, -1])
def test_another_byte_anywhere_is_refused(folder, tmp_path, at):
    packed = pack(folder, list_files(folder), tmp_path / "archive")
    data = bytearray((tmp_path / "archive").read_bytes())
    data[at] ^= 1
    (tmp_path / "archive").write_bytes(data)
    with pytest.raises(UnusableSnapshot, match="not those that were stored"):
        unpack(tmp_path / "archive", packed, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "full"]


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a//b"])
def test_a_path_out_of_the_folder_is_refused(tmp_path, name):
    path, packed = archive_of(tmp_path, (tarfile.TarInfo(name), b"code"))
    with pytest.raises(UnusableSnapshot, match="leaves the"):
        unpack(path, packed, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b"5"])
def test_whatever_is_no_regular_file_is_refused(tmp_path, kind):
    member = tarfile.TarInfo("a")
    member.type, member.linkname = kind, "/etc/passwd"
    path, packed = archive_of(tmp_path, (member, b""))
    with pytest.raises(UnusableSnapshot, match="no regular file"):
        unpack(path, packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_more_than_the_limit_is_neither_packed_nor_unpacked(folder, tmp_path, monkeypatch):
    packed = pack(folder, list_files(folder), tmp_path / "archive")
    monkeypatch.setattr(folder_archive, "MAX_BYTES", 10)
    with pytest.raises(UnusableSnapshot, match="more than"):
        pack(folder, list_files(folder), tmp_path / "other")
    with pytest.raises(UnusableSnapshot, match="holds more than"):
        unpack(tmp_path / "archive", packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_file_that_changes_while_it_is_packed_is_refused(folder, tmp_path):
    listing = list_files(folder)
    (folder / "a").write_bytes(b"more")
    with pytest.raises(UnusableSnapshot, match="changed while"):
        pack(folder, listing, tmp_path / "archive")


def test_bytes_that_are_no_archive_are_refused(tmp_path):
    (tmp_path / "archive").write_bytes(b"not a tar")
    with pytest.raises(UnusableSnapshot, match="cannot be unpacked"):
        unpack(tmp_path / "archive", digest_of(tmp_path / "archive"), tmp_path / "back")


def test_empty_folders_give_way_and_files_do_not(folder, tmp_path):
    packed = pack(folder, list_files(folder), tmp_path / "archive")
    (tmp_path / "back" / "inductor").mkdir(parents=True)
    unpack(tmp_path / "archive", packed, tmp_path / "back")
    (tmp_path / "back" / "a").write_bytes(b"own")
    with pytest.raises(OSError, match="not empty"):
        unpack(tmp_path / "archive", packed, tmp_path / "back")
    assert (tmp_path / "back" / "a").read_bytes() == b"own"
