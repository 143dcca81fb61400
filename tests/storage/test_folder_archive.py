"""Archives of a folder: what comes back, and what is refused before it is unpacked."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile

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


@pytest.fixture
def archive():
    """An open file for an archive."""
    with tempfile.TemporaryFile() as file:
        yield file


def put_members(archive, *members):
    """Make an archive with these members: (tar header, data)."""
    with gzip.open(archive, "wb") as plain, tarfile.open(fileobj=plain, mode="w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return digest_of(archive)


def test_a_folder_comes_back_with_its_times_and_closed_to_others(folder, archive, tmp_path):
    packed = pack(folder, list_files(folder), archive)
    unpack(archive, packed, tmp_path / "back")
    assert contents(tmp_path / "back") == FILES
    for name in FILES:
        assert (tmp_path / "back" / name).stat().st_mtime == 1e9
        assert (tmp_path / "back" / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o700
    assert packed == digest_of(archive)


def test_the_same_files_have_the_same_digest(folder):
    first, second = (pack(folder, list_files(folder), io.BytesIO()) for _ in range(2))
    assert first == second


def test_locks_temporary_files_and_links_are_left_out(folder):
    for name in ("locks/a", "inductor/.1.2.tmp", "inductor/a.lock", "triton/tmp.pid_1/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"passing")
    (folder / "link").symlink_to("/etc/passwd")
    assert list_files(folder).keys() == FILES.keys()


@pytest.mark.parametrize("at", [0, 20, -1])
def test_another_byte_anywhere_is_refused(folder, tmp_path, at):
    packed = pack(folder, list_files(folder), archive := io.BytesIO())
    data = bytearray(archive.getvalue())
    data[at] ^= 1
    with pytest.raises(UnusableSnapshot, match="not those that were stored"):
        unpack(io.BytesIO(data), packed, tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a//b"])
def test_a_path_out_of_the_folder_is_refused(archive, tmp_path, name):
    packed = put_members(archive, (tarfile.TarInfo(name), b"code"))
    with pytest.raises(UnusableSnapshot, match="leaves the"):
        unpack(archive, packed, tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b"5"])
def test_whatever_is_no_regular_file_is_refused(archive, tmp_path, kind):
    member = tarfile.TarInfo("a")
    member.type, member.linkname = kind, "/etc/passwd"
    packed = put_members(archive, (member, b""))
    with pytest.raises(UnusableSnapshot, match="no regular file"):
        unpack(archive, packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_more_than_the_limit_is_neither_packed_nor_unpacked(folder, archive, tmp_path, monkeypatch):
    packed = pack(folder, list_files(folder), archive)
    monkeypatch.setattr(folder_archive, "MAX_BYTES", 10)
    with pytest.raises(UnusableSnapshot, match="more than"):
        pack(folder, list_files(folder), io.BytesIO())
    with pytest.raises(UnusableSnapshot, match="holds more than"):
        unpack(archive, packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_file_that_changes_while_it_is_packed_is_refused(folder, archive):
    listing = list_files(folder)
    (folder / "a").write_bytes(b"more")
    with pytest.raises(UnusableSnapshot, match="changed while"):
        pack(folder, listing, archive)


def test_bytes_that_are_no_archive_are_refused(tmp_path):
    archive = io.BytesIO(b"not a tar")
    with pytest.raises(UnusableSnapshot, match="cannot be unpacked"):
        unpack(archive, digest_of(archive), tmp_path / "back")


def test_empty_folders_give_way_and_files_do_not(folder, archive, tmp_path):
    packed = pack(folder, list_files(folder), archive)
    (tmp_path / "back" / "inductor").mkdir(parents=True)
    unpack(archive, packed, tmp_path / "back")
    (tmp_path / "back" / "a").write_bytes(b"own")
    with pytest.raises(OSError, match="not empty"):
        unpack(archive, packed, tmp_path / "back")
    assert (tmp_path / "back" / "a").read_bytes() == b"own"
