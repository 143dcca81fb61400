"""Copies of compile caches in tiers: which one is fetched, and what makes a start cold."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from tests.limits import HANG_S
from tests.s3_servers import BUCKET
from trainckpt import ConfigurationError, TierUnavailable
from trainckpt.attempt.options import read_options
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.ranks.world import World
from trainckpt.replicate import compile_cache
from trainckpt.replicate.compile_cache import fetch, prune, read_entry, set_up, upload
from trainckpt.storage.folder_archive import list_files
from trainckpt.storage.local import Disk, LocalTier
from trainckpt.storage.object_store import open_object_store

TOOLCHAIN, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def tier(tmp_path):
    return LocalTier(tmp_path / "tier")


@pytest.fixture
def host(tmp_path):
    """Return the empty folder of a command on a host with a toolchain."""

    def make(name: str, toolchain: str = TOOLCHAIN):
        folder = tmp_path / name / toolchain / "command"
        folder.mkdir(parents=True)
        return folder

    return make


def compiled(folder, code: bytes = b"code"):
    (folder / "inductor").mkdir()
    (folder / "inductor" / "kernel.so").write_bytes(code)
    return folder


def put(tier, folder):
    return upload(tier, folder, list_files(folder))


def code_of(folder):
    return (folder / "inductor" / "kernel.so").read_bytes()


def test_another_host_with_the_same_toolchain_gets_the_caches(tier, host):
    put(tier, compiled(host("first")))
    second = host("second")
    assert fetch([tier], second)
    assert code_of(second) == b"code"
    assert [path.name for path in second.parent.iterdir()] == ["command"]


def test_a_store_holds_copies_too(rclone_server, at, host):
    at(rclone_server)
    store = open_object_store(f"s3://{BUCKET}/compiled")
    first = compiled(host("first"))
    put(store, first)
    (first / "inductor" / "kernel.so").write_bytes(b"newer code")
    entry = put(store, first)
    assert store.list("compile-cache") == sorted([f"{TOOLCHAIN}.json", f"{entry.sha256}.tar.gz"])
    assert fetch([store], second := host("second"))
    assert code_of(second) == b"newer code"


def test_another_toolchain_gets_nothing(tier, host):
    put(tier, compiled(host("first")))
    second = host("second", OTHER)
    assert not fetch([tier], second)
    assert not list_files(second)


def test_a_warm_host_fetches_nothing(tier, host):
    put(tier, compiled(host("first")))
    second = compiled(host("second"), b"own")
    assert not fetch([tier], second)
    assert code_of(second) == b"own"


@pytest.mark.parametrize("changed", ["a flipped bit", "cut", "gone", "another digest", "no JSON"])
def test_a_bad_copy_is_named_and_the_start_is_cold(tier, host, caplog, changed):
    entry = put(tier, compiled(host("first")))
    archive, key = tier.root / entry.key, f"compile-cache/{TOOLCHAIN}.json"
    data = bytearray(archive.read_bytes())
    if changed == "a flipped bit":
        data[30] ^= 1
        archive.write_bytes(data)
    elif changed == "cut":
        archive.write_bytes(data[:-1])
    elif changed == "gone":
        archive.unlink()
    elif changed == "another digest":
        stored = json.loads((tier.root / key).read_text())
        (tier.root / key).write_text(json.dumps({**stored, "sha256": "0" * 64}))
    else:
        (tier.root / key).write_text("[1]")
    second = host("second")
    with caplog.at_level(logging.WARNING):
        assert not fetch([tier], second)
    assert not list_files(second)
    named = key if changed in ("another digest", "no JSON") else entry.key
    assert named in caplog.text
    assert tier.url in caplog.text


def test_the_next_tier_is_asked_after_a_bad_copy(tier, host, tmp_path):
    first, farther = compiled(host("first")), LocalTier(tmp_path / "farther")
    put(farther, first)
    (tier.root / put(tier, first).key).write_bytes(b"bad")
    second = host("second")
    assert fetch([tier, farther], second)
    assert code_of(second) == b"code"


def test_an_archive_under_a_name_out_of_the_tier_is_refused(tier, host, caplog):
    entry = put(tier, compiled(host("first")))
    stored = {"sha256": "../../x", "num_bytes": entry.num_bytes, "stored": entry.stored}
    key = f"compile-cache/{TOOLCHAIN}.json"
    tier.replace(key, compile_cache.json_io.with_digest(stored))
    with caplog.at_level(logging.WARNING):
        assert not fetch([tier], host("second"))
    assert "sha256" in caplog.text


def test_the_newest_archive_of_a_toolchain_replaces_the_older_one(tier, host):
    first = compiled(host("first"))
    older = put(tier, first)
    (first / "inductor" / "kernel.so").write_bytes(b"newer code")
    newer = put(tier, first)
    assert tier.size(older.key) is None
    assert read_entry(tier, TOOLCHAIN) == newer
    assert put(tier, first).sha256 == newer.sha256  # unchanged files: nothing is sent again


def test_the_newest_toolchains_stay(tier, host):
    for digit in "012345":
        put(tier, compiled(host(digit, digit * 32), digit.encode()))
    prune(tier)
    entries = [name for name in tier.list("compile-cache") if name.endswith(".json")]
    assert entries == [f"{digit * 32}.json" for digit in "2345"]
    assert len(tier.list("compile-cache")) == 2 * len(entries)


DIES = """
import os, sys
from pathlib import Path
from trainckpt.replicate.compile_cache import upload
from trainckpt.storage.folder_archive import list_files
from trainckpt.storage.local import Disk, LocalTier

class DiesAfterAWrite(Disk):
    def write(self, path, descriptor, block, first_byte):
        super().write(path, descriptor, block, first_byte)
        os._exit(7)

folder = Path(sys.argv[2])
upload(LocalTier(sys.argv[1], DiesAfterAWrite()), folder, list_files(folder))
"""


def test_an_upload_that_a_kill_cuts_leaves_nothing_on_the_host_and_is_written_again(tier, host):
    first = compiled(host("first"), os.urandom(9 << 20))  # two blocks
    command = [sys.executable, "-c", DIES, str(tier.root), str(first)]
    assert subprocess.run(command, check=False, timeout=HANG_S).returncode == 7
    assert [path.name for path in first.parent.iterdir()] == ["command"]
    entry = put(tier, first)
    names = sorted(path.name for path in (tier.root / "compile-cache").iterdir())
    assert names == sorted([f"{TOOLCHAIN}.json", f"{entry.sha256}.tar.gz"])
    assert fetch([tier], second := host("second"))
    assert code_of(second) == code_of(first)


def test_an_archive_that_no_entry_names_is_not_trusted_for_its_length(tier, host):
    entry = put(tier, first := compiled(host("first")))
    (tier.root / entry.key).write_bytes(bytes(entry.num_bytes))
    tier.remove(f"compile-cache/{TOOLCHAIN}.json")
    put(tier, first)
    assert fetch([tier], host("second"))


def test_a_full_tier_leaves_the_older_copy_in_place(tier, host):
    class FullDisk(Disk):
        def write(self, path, descriptor, block, first_byte):
            raise OSError(errno.ENOSPC, "no space left")

    first = compiled(host("first"))
    older = put(tier, first)
    (first / "inductor" / "kernel.so").write_bytes(b"newer code")
    with pytest.raises(TierUnavailable, match=r"(?i)no space left"):
        put(LocalTier(tier.root, FullDisk()), first)
    assert read_entry(tier, TOOLCHAIN) == older
    assert fetch([tier], second := host("second"))
    assert code_of(second) == b"code"
    assert [path.name for path in first.parent.iterdir()] == ["command"]


class HangingTier(LocalTier):
    """A tier that answers for its entry, and for an archive only once it is released."""

    def __init__(self, root):
        super().__init__(root)
        self.asked, self.released = threading.Event(), threading.Event()

    def read_into(self, key, first_byte, into):
        self.asked.set()
        assert self.released.wait(HANG_S)
        super().read_into(key, first_byte, into)


def test_a_hanging_tier_lets_the_start_go_on_and_puts_nothing_in_place_later(tier, host, caplog):
    put(tier, compiled(host("first")))
    hanging, second = HangingTier(tier.root), host("second")
    before = set(threading.enumerate())
    assert not fetch([hanging], second, within_s=0.1)
    assert "no copy was fetched within 0.1 s" in caplog.text
    (second / "inductor").mkdir()  # the start compiles
    assert hanging.asked.wait(HANG_S)
    late = set(threading.enumerate()) - before
    hanging.released.set()
    for thread in late:
        thread.join(HANG_S)
    assert "it came after the start had gone on" in caplog.text
    assert sorted(path.name for path in second.parent.iterdir()) == ["command"]
    assert list(second.iterdir()) == [second / "inductor"]


def test_all_fetches_together_end_long_before_the_other_ranks_give_up():
    assert compile_cache.FETCH_WITHIN_S < RANKS_TIMEOUT_S / 4


class Ranks:
    """The store of one rank among others of its host, which notes what it exchanges."""

    def __init__(self, rank: int) -> None:
        self.world, self.exchanged = World(rank, 2, rank, "host"), []

    def gather(self, key, value, timeout_s):
        self.exchanged.append(key)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_a_host_fetches_and_all_wait_for_it(tier, host, monkeypatch, rank):
    put(tier, compiled(host("first")))
    second, channel = host("cache/compile"), Ranks(rank)
    monkeypatch.setenv("TRAINCKPT_CACHE", str(second.parent.parent.parent))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(second / "inductor"))
    uploaded = set_up(["tiers", "tiers"], channel, ["host", "host"], [tier])
    assert uploaded == (second if rank == 0 else None)
    assert bool(list_files(second)) == (rank == 0)
    assert channel.exchanged == ["compile cache"]


@pytest.mark.parametrize("folder", [None, "/scratch/mine", "shared"])
def test_processes_without_a_folder_of_their_own_are_warned(
    tier, tmp_path, monkeypatch, caplog, folder
):
    monkeypatch.setenv("TRAINCKPT_CACHE", str(tmp_path / "cache"))
    if folder == "shared":
        folder = str(tmp_path / "cache" / "compile" / TOOLCHAIN / "shared" / "inductor")
    if folder is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    with caplog.at_level(logging.WARNING):
        assert set_up(["tiers", "tiers"], Ranks(0), ["host", "host"], [tier]) is None
    assert "trainckpt run --compile-cache tiers" in caplog.text


def test_without_the_option_nothing_is_exchanged_or_fetched(tier, host, caplog):
    put(tier, compiled(host("first")))
    channel = Ranks(0)
    assert set_up(["host", "host"], channel, ["host", "host"], [tier]) is None
    assert channel.exchanged == []
    assert caplog.text == ""


@pytest.mark.parametrize("reaches", [["tiers", "host"], ["host", "tiers"]])
def test_ranks_with_different_options_are_warned_and_wait_for_nothing(tier, caplog, reaches):
    for rank, warnings in enumerate((1, 0)):
        channel = Ranks(rank)
        caplog.clear()
        assert set_up(reaches, channel, ["host", "host"], [tier]) is None
        assert channel.exchanged == []
        assert len(caplog.records) == warnings
        assert warnings == 0 or f'"{reaches[1]}" on rank 1: nothing is copied' in caplog.text


def test_caches_made_after_the_start_are_copied_once_they_no_longer_change(tier, host, monkeypatch):
    monkeypatch.setattr(compile_cache, "LOOK_S", 0.01)
    monkeypatch.setattr(compile_cache, "LOOK_AGAIN_S", 0.01)
    folder, looks = host("first"), []

    def is_over():
        looks.append(1)
        if len(looks) == 3:
            compiled(folder)
        return tier.size(f"compile-cache/{TOOLCHAIN}.json") is not None

    upload = compile_cache.CompileCacheUpload(
        tier, folder, num_steps=lambda: len(looks) - 5, is_over=is_over
    )
    upload.start()
    (thread,) = (t for t in threading.enumerate() if t.name == "trainckpt-compile-cache")
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert len(looks) >= 5 + compile_cache.FIRST_STEPS
    assert fetch([tier], host("second"))


def test_an_encrypted_run_refuses_to_copy_caches_in_the_clear():
    recipient = {"encrypt_to": "trainckpt-recipient-x", "compile_cache": "tiers"}
    with pytest.raises(ConfigurationError, match="unencrypted"):
        compile_cache.check(read_options(recipient, {}))
    compile_cache.check(read_options({**recipient, "compile_cache": "host"}, {}))
