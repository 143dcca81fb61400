"""The folder for compile caches: whose it is, and what another toolchain is."""

from __future__ import annotations

import os
import queue
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.limits import HANG_S
from trainckpt.attempt.launch import redact_environment
from trainckpt.storage import compile_folder
from trainckpt.storage.compile_folder import cpu_facts, folder_in_use, is_ours, variables

CPU = """processor\t: 0
model name\t: A CPU
cpu MHz\t\t: 2600.000
flags\t\t: fpu avx2

processor\t: 1
model name\t: Another
"""


@pytest.fixture
def environment(tmp_path):
    """The environment of a launch whose caches lie in this test's folder."""
    return {"TRAINCKPT_CACHE": str(tmp_path / "cache")}


def test_the_folder_is_private_and_named_after_the_toolchain(environment):
    found = variables("shared", environment)
    inductor, triton = (
        Path(found[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    )
    assert inductor.parent == triton.parent
    assert inductor.parts[-4:] == ("compile", compile_folder.toolchain(), "shared", "inductor")
    for folder in list(inductor.parents)[:4]:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert folder_in_use({**environment, **found}) == inductor.parent


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_folder_of_the_users_own_is_left_alone(environment, name):
    environment[name] = "/scratch/caches"
    assert variables("shared", environment) == {}
    assert not Path(environment["TRAINCKPT_CACHE"]).exists()
    assert folder_in_use(environment) is None
    assert not is_ours(name, environment)


def test_a_folder_open_to_others_is_not_used(environment):
    Path(environment["TRAINCKPT_CACHE"]).mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="another user"):
        variables("shared", environment)


def test_a_link_is_not_followed(environment, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    Path(environment["TRAINCKPT_CACHE"]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        variables("shared", environment)


def test_a_file_system_without_programs_is_not_used(environment, monkeypatch):
    real = os.statvfs

    def mounted_noexec(path):
        return SimpleNamespace(f_flag=real(path).f_flag | os.ST_NOEXEC)

    monkeypatch.setattr(os, "statvfs", mounted_noexec)
    with pytest.raises(OSError, match="noexec"):
        variables("shared", environment)


def age(path, seconds):
    now_s = time.time()
    os.utime(path, (now_s, now_s - seconds))


def folder_of(name, environment):
    return Path(variables(name, environment)["TORCHINDUCTOR_CACHE_DIR"]).parent


def test_a_folder_that_is_no_longer_launched_is_removed(environment):
    names = ("0" * 16, "1" * 16, "shared")
    idle, used, shared = (folder_of(name, environment) for name in names)
    for folder in (idle, used, shared):
        (folder / "inductor").mkdir()
        age(folder, compile_folder.MOST_IDLE_S + (60 if folder != used else -60))
    assert folder_of("shared", environment) == shared
    assert [folder.exists() for folder in (idle, used, shared)] == [False, True, True]


@pytest.mark.parametrize("name", ["gcc-build/shared", f"{'0' * 32}/sources", f"{'0' * 32}x/shared"])
def test_another_name_than_ours_is_never_removed(environment, name):
    shared = folder_of("shared", environment)
    mine = shared.parent.parent / name
    mine.mkdir(parents=True)
    age(mine, 2 * compile_folder.MOST_IDLE_S)
    variables("shared", environment)
    assert mine.exists()


def test_remains_of_a_killed_writer_are_removed_after_a_day(environment):
    shared = folder_of("shared", environment)
    file, folder, new = (shared.parent / f".tmp-{name}" for name in ("file", "folder", "new"))
    (folder / "inductor").mkdir(parents=True)
    for path in (file, new):
        path.write_bytes(b"half an archive")
    for path in (file, folder):
        age(path, compile_folder.MOST_TEMPORARY_S + 60)
    variables("shared", environment)
    assert sorted(shared.parent.iterdir()) == [new, shared]


def test_a_launch_renews_its_folder_at_its_start_and_each_day(environment, monkeypatch):
    environment |= variables("shared", environment)
    folder, renewed = folder_in_use(environment), queue.SimpleQueue()
    age(folder, 2 * compile_folder.MOST_IDLE_S)
    with compile_folder.in_use(environment):
        assert time.time() - folder.stat().st_mtime < compile_folder.MOST_IDLE_S
    monkeypatch.setattr(compile_folder, "DAY_S", 0.001)
    monkeypatch.setattr(compile_folder.os, "utime", renewed.put)
    with compile_folder.in_use(environment):
        assert {renewed.get(timeout=HANG_S) for _ in range(3)} == {folder}


def test_another_processor_or_instruction_is_another_toolchain():
    facts = cpu_facts(CPU)
    assert facts == {"model name": "A CPU", "flags": "fpu avx2"}
    assert cpu_facts(CPU.replace("2600", "3100")) == facts
    assert cpu_facts(CPU.replace("avx2", "avx2 avx512f")) != facts


def test_another_torch_is_another_toolchain(monkeypatch):
    before = compile_folder.toolchain()
    assert compile_folder.toolchain() == before
    monkeypatch.setattr(compile_folder.metadata, "version", lambda package: "9.9")
    assert compile_folder.toolchain() != before


def test_records_hold_the_users_folder_and_not_ours(environment):
    own = variables("shared", environment)
    assert not own.keys() & redact_environment({**environment, **own}).keys()
    users = {"TORCHINDUCTOR_CACHE_DIR": "/scratch/caches"}
    assert redact_environment(users) == users
