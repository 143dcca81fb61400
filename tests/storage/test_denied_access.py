"""Errors of denied access name the file or folder that denies it, its owner, and what to type."""

from __future__ import annotations

import contextlib
import os
import stat

import pytest

from trainckpt.attempt.options import read_options
from trainckpt.errors import TrainckptError
from trainckpt.storage.local import LocalTier

NOBODY, OTHER = 65534, 65533

pytestmark = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="becomes another user, so needs root"
)


def as_nobody(act):
    """What `act` says as another user: its result, or the error and its hint."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                said = str(act())
            except TrainckptError as error:
                said = str(error)
            os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as file:  # noqa: PTH123 - a descriptor
        return file.read().decode()


def folder(path, owner, mode):
    path.mkdir()
    os.chown(path, owner, owner)
    path.chmod(mode)
    return path


def made(path, owner, mode=0o600):
    path.write_bytes(b"{}")
    os.chown(path, owner, owner)
    path.chmod(mode)
    return path


def test_a_closed_run_is_named_and_not_the_file_that_was_looked_for(open_path):
    run = folder(open_path / "run", OTHER, 0o700)
    said = as_nobody(lambda: LocalTier(run).size("run.json"))
    assert f"cannot look at {run}/run.json: Permission denied ({run} belongs to {OTHER}" in said
    assert "mode 0700; this is nobody)" in said
    assert f"next: start it as {OTHER}, or hand it over, as root: chown -R nobody {run}" in said


def test_a_closed_folder_above_the_run_is_named(open_path):
    home = folder(open_path / "home", OTHER, 0o700)
    folder(home / "run", NOBODY, 0o700)
    said = as_nobody(lambda: LocalTier(home / "run").list("attempts"))
    assert f"({home} belongs to {OTHER}, mode 0700; this is nobody)" in said
    assert f"next: start it as {OTHER}, or open the way: chmod o+x {home}, as {OTHER}" in said


def test_a_file_of_another_user_is_named_and_all_of_the_run_handed_over(open_path):
    run = folder(open_path / "run", NOBODY, 0o700)
    file = made(run / "run.json", 0)
    said = as_nobody(lambda: LocalTier(run).read("run.json", max_bytes=99))
    assert f"({file} belongs to root, mode 0600; this is nobody)" in said
    assert f"chown -R nobody {run}" in said


def test_a_folder_that_takes_no_file_is_named_and_no_temporary_name(open_path):
    run = folder(open_path / "run", OTHER, 0o755)
    for act in (
        lambda: LocalTier(run).create("attempts/1.json", b""),
        lambda: LocalTier(run).replace("attempts/1.json", b""),
    ):
        said = as_nobody(act)
        assert f"({run} belongs to {OTHER}, mode 0755; this is nobody)" in said
        assert f"next: start it as {OTHER}, or hand it over, as root: chown -R nobody {run}" in said


def test_ones_own_closed_folder_is_opened_by_chmod(open_path):
    run = folder(open_path / "run", NOBODY, 0o500)
    said = as_nobody(lambda: LocalTier(run).replace("a", b""))
    assert f"next: chmod -R u+rwX {run}" in said
    said = as_nobody(lambda: LocalTier(run / "inner").make_folder(""))
    assert f"next: chmod u+rwx {run}" in said


def test_another_users_file_in_a_sticky_folder_is_not_removed_and_its_owner_named(open_path):
    run = folder(open_path / "run", OTHER, 0o1777)
    made(run / "a", OTHER, 0o666)
    said = as_nobody(lambda: LocalTier(run).remove("a"))
    assert f"({run} belongs to {OTHER}, mode 1777; this is nobody)" in said
    assert (run / "a").exists()


@pytest.mark.parametrize("mode", [0o333, 0o1733])
def test_a_run_is_made_in_a_folder_that_may_be_written_and_not_read(open_path, mode):
    drop = folder(open_path / "drop", OTHER, mode)
    assert as_nobody(lambda: LocalTier(drop / "run").create("run.json", b"{}")) == "True"
    assert stat.S_IMODE((drop / "run").stat().st_mode) == 0o700
    assert (drop / "run" / "run.json").read_bytes() == b"{}"


def test_a_folder_of_the_run_that_takes_no_file_is_found_before_anything_is_trained(open_path):
    run = folder(open_path / "run", NOBODY, 0o700)
    folder(run / "snapshots", OTHER, 0o755)
    said = as_nobody(lambda: LocalTier(run).must_take_files("snapshots"))
    assert f"({run}/snapshots belongs to {OTHER}, mode 0755; this is nobody)" in said
    assert as_nobody(lambda: LocalTier(run).must_take_files("attempts")) == "None"
    os.chown(run / "snapshots", NOBODY, NOBODY)
    assert as_nobody(lambda: LocalTier(run).must_take_files("snapshots")) == "None"
    assert list((run / "snapshots").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o711])
def test_a_folder_above_that_takes_no_run_is_left_to_its_owner(open_path, mode):
    """Never is handed over what may hold the files of others."""
    above = folder(open_path / "scratch", OTHER, mode)
    said = as_nobody(lambda: LocalTier(above / "run").make_folder(""))
    assert f"({above} belongs to {OTHER}, mode {mode:04o}; this is nobody)" in said
    made = f"mkdir {above}/run; chown nobody {above}/run"
    assert (
        f"next: name a place that nobody may write to, or have it made, as {OTHER}: {made}" in said
    )
    assert "-R" not in said


def test_a_working_directory_below_a_closed_folder_is_a_refusal_and_no_crash(
    open_path, monkeypatch
):
    """Options may be there, and are not to be passed over."""
    inner = folder(open_path / "closed", OTHER, 0o700) / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert "trainckpt.toml is not readable: [Errno 13]" in as_nobody(lambda: read_options({}))
