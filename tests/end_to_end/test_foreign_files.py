"""What others put into a run's folders: nothing waits for it, and it keeps no old snapshot."""

from __future__ import annotations

import os
import socket

import pytest

from tests.end_to_end.training import attempt, crashed, usable
from trainckpt.cli.main import main as command
from trainckpt.errors import TierUnavailable
from trainckpt.storage.shared_memory import SharedMemoryDir

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="pipes are files of POSIX systems"),
    pytest.mark.timeout(120),  # a pipe that is opened waits for its other end for ever
]
NAME = "s9~1.9"


def listen(path):
    """A socket's file; a socket takes no longer path than about 100 bytes."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def folder_with(make, name="rank00000.safetensors"):
    def made(path):
        path.mkdir()
        make(path / name)

    return made


THINGS = {
    "file": lambda path: path.write_text("of somebody else"),
    "pipe": os.mkfifo,
    "socket": listen,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder of a pipe": folder_with(os.mkfifo),
    "folder of a socket": folder_with(listen),
    "folder of a folder": folder_with(os.mkdir),
    "folder of a manifest that is a folder": folder_with(os.mkdir, "manifest.json"),
    "folder of a manifest that is a pipe": folder_with(os.mkfifo, "manifest.json"),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that has kept each of its four snapshots."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    crashed("run", 8, every="1 steps", keep_last=9)
    return tmp_path / "run"


@pytest.mark.parametrize("thing", THINGS)
def test_what_has_a_snapshots_name_keeps_no_old_snapshot(run, thing, caplog):
    THINGS[thing](run / "snapshots" / NAME)
    attempt("run", every="1 steps", keep_last=1)
    assert len(usable(run)) == 1
    assert "could not prune" not in caplog.text


@pytest.mark.parametrize("thing", THINGS)
def test_what_has_a_snapshots_name_is_passed_over_by_the_command(run, thing):
    THINGS[thing](run / "snapshots" / NAME)
    assert command(["prune", "run", "--dry-run"]) == 0
    assert command(["prune", "run", "--keep-last", "2"]) == 0
    assert usable(run) == ["s3~1.3", "s4~1.4"]


@pytest.mark.parametrize("thing", ["pipe", "socket", "link to itself", "folder of a folder"])
def test_what_has_a_shard_files_name_refuses_its_snapshot_alone(run, thing, caplog):
    file = run / "snapshots/s4~1.4/rank00000.safetensors"
    file.unlink()
    THINGS[thing](file)
    SharedMemoryDir.found("run").remove()
    assert usable(run)[-1] == "s3~1.3"
    for verb in ("list", "status", "prune"):
        assert command([verb, "run"]) == 0
    caplog.set_level("INFO", "trainckpt")
    _, ckpt = attempt("run")
    assert str(ckpt._attempt.beginning.manifest.name) == "s3~1.3"
    assert "skipped snapshot s4~1.4: snapshots/s4~1.4/rank00000.safetensors is " in caplog.text


def test_snapshots_on_a_disk_that_is_not_mounted_are_named_before_training(run):
    """Also where a slower tier has all of them: no save would succeed."""
    attempt("run", tiers=["far"])
    (run / "snapshots").rename(run.parent / "disk")
    (run / "snapshots").symlink_to(run.parent / "unmounted")
    with pytest.raises(TierUnavailable, match="unmounted, which does not exist"):
        attempt("run", epochs=3, tiers=["far"])
    assert [path.name for path in sorted((run / "attempts").glob("*.json"))] == ["1.json", "2.json"]


@pytest.mark.parametrize("name", ["@eaDir", ".AppleDouble", ".tmp-copy-of-somebody"])
def test_a_folder_inside_a_snapshot_keeps_none_and_stays(run, name):
    for snapshot in (run / "snapshots").iterdir():
        (snapshot / name).mkdir()
        (snapshot / name / "thumbnail").write_text("not ours")
    attempt("run", every="1 steps", keep_last=1)
    assert len(usable(run)) == 1
    left = run / "snapshots/s1~1.1"
    assert [path.name for path in left.iterdir()] == [name]
    assert (left / name / "thumbnail").read_text() == "not ours"


def test_files_beside_a_snapshots_own_go_with_it(run):
    for name in (".DS_Store", "._manifest.json", "manifest.json~", "rank00000.safetensors.bak"):
        (run / "snapshots/s1~1.1" / name).write_text("")
    (run / "snapshots/s1~1.1" / "out").symlink_to(run / "attempts")
    assert command(["prune", "run", "--keep-last", "1"]) == 0
    assert [path.name for path in (run / "snapshots").iterdir()] == ["s4~1.4"]
    assert (run / "attempts/1.json").exists()


def test_a_link_in_a_snapshots_place_goes_and_what_it_leads_to_stays(run):
    """An old snapshot that was moved away, and a folder that was never one."""
    (run / "snapshots/s1~1.1").rename(run.parent / "moved")
    (run / "snapshots/s1~1.1").symlink_to(run.parent / "moved")
    (run.parent / "photos").mkdir()
    (run.parent / "photos/cat").write_text("dear")
    (run / "snapshots" / NAME).symlink_to(run.parent / "photos")
    assert usable(run)[0] == "s1~1.1"
    assert command(["prune", "run", "--keep-last", "1"]) == 0
    assert [path.name for path in (run / "snapshots").iterdir()] == ["s4~1.4"]
    assert (run.parent / "moved/rank00000.safetensors").exists()
    assert (run.parent / "photos/cat").read_text() == "dear"


RECORDS = ["pipe", "socket", "link to nothing", "link to itself", "folder of a folder"]


@pytest.mark.parametrize("thing", RECORDS)
def test_what_has_a_records_name_keeps_no_copy_from_a_slower_tier(run, thing):
    THINGS[thing](run / "attempts/9.json")
    attempt("run", every="1 steps", tiers=["far"])
    assert usable("far")[-1] == usable("run")[-1]


@pytest.mark.parametrize("thing", RECORDS)
def test_what_has_a_records_name_in_a_tier_keeps_no_run_from_going_on(run, thing):
    attempt("run", every="1 steps", tiers=["far"])
    run.rename(run.parent / "lost")
    THINGS[thing](run.parent / "far/attempts/9.json")
    _, ckpt = attempt("run", epochs=3, tiers=["far"])
    assert ckpt.attempt > 2
    assert usable("run")


@pytest.mark.parametrize("thing", RECORDS)
@pytest.mark.parametrize("name", ["1.heartbeat", "9.heartbeat", "1.times"])
def test_what_has_a_heartbeats_name_is_no_sign_of_life(run, thing, name):
    (run / "attempts" / name).unlink(missing_ok=True)
    THINGS[thing](run / "attempts" / name)
    for verb in ("report", "status", "list"):
        assert command([verb, "run", *(["--json"] if verb == "report" else [])]) == 0
    assert command(["pause", "run"]) == 66
