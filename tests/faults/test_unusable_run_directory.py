"""The run's place when a run attaches: dead, closed, mistyped, or unable to hold a commit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time

import pytest

from tests.end_to_end.training import Crash, attempt, crashed, record, usable
from tests.faults import programs
from tests.faults.dead_mount import dead_mount, why_not
from tests.long_cases import long
from trainckpt.errors import ConfigurationError, TierUnavailable
from trainckpt.preemption import slurm
from trainckpt.ranks.store import local_store
from trainckpt.ranks.world import World
from trainckpt.run_directory import run_url as places
from trainckpt.run_directory.validate import RankLocation, attach
from trainckpt.storage.local import Disk, LocalTier

dead = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
RESTARTS = ("TRAINCKPT_RESTART", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def _first_start(monkeypatch):
    for name in (*RESTARTS, "TRAINCKPT_RUN", "TRAINCKPT_PROVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def begins(server):
    """Exit code and words of a process that begins a run there."""

    def begins(place, *arguments):
        found = programs.run(server, "begins", place, *arguments)
        return (0, "\n".join(found)) if isinstance(found, list) else found

    return begins


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with commits."""
    place = tmp_path_factory.mktemp("trained") / "run"
    attempt(place, keep_last=9)
    return place


# ---- places that do not answer


@dead
@pytest.mark.parametrize("mode", ["auto", *long("required", "never")])
def test_a_place_that_hangs_is_69_and_named_within_the_limit(begins, tmp_path, mode):
    with dead_mount(tmp_path / "net"):
        begun = time.monotonic()
        code, said = begins(f"{tmp_path}/net/run", mode, 1.0)
        assert time.monotonic() - begun < 60
    assert code == 69, said
    assert f"{tmp_path}/net/run did not answer within 1 s" in said
    assert "next: see whether its file system is mounted" in said


@dead
def test_a_place_whose_server_is_gone_is_69_and_no_new_run(begins, tmp_path):
    with dead_mount(tmp_path / "net") as disconnect:
        disconnect()
        code, said = begins(f"{tmp_path}/net/run")
    assert code == 69, said
    assert os.strerror(errno.ENOTCONN) in said
    assert list((tmp_path / "net").iterdir()) == []


@pytest.mark.parametrize("place", ["link", "link/run"])
def test_a_place_whose_volume_is_not_mounted_is_69_with_the_link_that_leads_there(
    begins, tmp_path, place
):
    (tmp_path / "link").symlink_to(tmp_path / "volume")
    code, said = begins(tmp_path / place)
    assert code == 69, said
    assert f"{tmp_path}/link is a link to {tmp_path}/volume, which does not exist" in said
    assert f"next: mount the file system of {tmp_path}/volume, or name another directory" in said
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@dead
@pytest.mark.parametrize("name", [RESTARTS[0], *long(*RESTARTS[1:])])
def test_a_requeued_run_whose_place_does_not_answer_is_69(begins, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with dead_mount(tmp_path / "net") as disconnect:
        disconnect()
        assert begins(f"{tmp_path}/net/run")[0] == 69


# ---- requeued runs

AFRESH = {
    "SLURM_RESTART_COUNT": "submit the script again with sbatch",
    "TORCHELASTIC_RESTART_COUNT": "start torchrun again",
    "TRAINCKPT_RESTART": "without TRAINCKPT_RESTART",
}


@pytest.mark.parametrize("name", RESTARTS)
def test_a_requeued_run_with_a_mistyped_place_is_66_and_nothing_is_made(
    begins, tmp_path, monkeypatch, name
):
    monkeypatch.setenv(name, "2")
    code, said = begins(tmp_path / "deep" / "mistyped")
    assert code == 66, said
    assert f"there is no run at {tmp_path}/deep/mistyped, and {name}=2 says" in said
    assert "next: check the path" in said
    assert AFRESH[name] in said, "for one that was stopped before its run had begun"
    assert "resume='never'" not in said, "each restart would begin anew"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("restart", "command_word", "code"), [(1, "abc", 0), (2, "abc", 66), (1, "d", 66), (1, "", 66)]
)
def test_a_command_whose_first_start_began_no_run_begins_it_in_the_next_once_and_no_later_one(
    begins, tmp_path, monkeypatch, restart, command_word, code
):
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    (command.parent / "comment").write_text(f"mine {slurm.noted('', 1, 'abc')}")
    command.write_text(
        '#!/bin/sh\ncd "${0%/*}"\n[ "$1" != update ] || printf %s "${3#Comment=}" >comment\n'
        "printf 'JobId=7 JobName=x\\n   JobState=RUNNING\\n   Comment=%s\\n   StdErr=/x\\n\\n' "
        '"$(cat comment)"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
    monkeypatch.setenv("TRAINCKPT_COMMAND", command_word)
    ended, said = begins(tmp_path / "run")
    assert ended == code, said
    assert ("stopped before its run had begun" in said) == (code == 0)
    assert (tmp_path / "run").exists() == (code == 0)
    assert ((command.parent / "comment").read_text() == "mine") == (code == 0)
    if code == 0:  # in this start it has begun now
        assert begins(tmp_path / "lost")[0] == 66


def test_required_without_a_run_is_66_and_nothing_is_made(begins, tmp_path):
    code, said = begins(tmp_path / "deep" / "mistyped", "required")
    assert code == 66, said
    assert list(tmp_path.iterdir()) == []


def test_a_requeued_run_without_a_commit_starts_at_step_0_and_says_so(
    begins, tmp_path, monkeypatch
):
    crashed(tmp_path / "run", 1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, said = begins(tmp_path / "run")
    assert code == 0, said
    assert "attempt 2: begins at step 0 (nothing was ever committed)" in said


@pytest.mark.parametrize("requeued", [False, True])
def test_a_run_whose_every_commit_is_bad_is_65_and_its_record_says_why(
    begins, trained, tmp_path, monkeypatch, requeued
):
    place = tmp_path / "run"
    shutil.copytree(trained, place)
    if requeued:
        monkeypatch.setenv("TRAINCKPT_RESTART", "1")
    bad = usable(place)
    for file in (place / "snapshots").glob("*/rank*"):
        file.write_bytes(bytes(file.stat().st_size))
    code, said = begins(place)
    assert code == 65, said
    assert all(name in said for name in bad)
    outcome = record(place, 2)["outcome"]
    assert (outcome["outcome"], outcome["exit_code"]) == ("failed", 65)


def test_a_run_whose_commits_are_gone_is_65(begins, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "snapshots")
    code, said = begins(tmp_path / "run")
    assert code == 65, said
    assert "attempt 1 committed it, but it is missing" in said


# ---- what a place can do


def test_what_the_place_can_do_is_in_the_record_and_nothing_is_left_of_trying_it(tmp_path):
    attempt(tmp_path / "run")
    found = record(tmp_path / "run", 1)["place"]
    assert found["rename"] is found["folder_sync"] is found["lock"] is True
    assert found["create_only"] == "link"
    assert found["free_bytes"] > 0
    assert found["file_system"]
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert [name for name in left if name not in ("alive", "notices")] == [
        "attempts",
        "run.json",
        "snapshots",
    ]


class NoRename(Disk):
    def rename(self, source, target):
        raise OSError(errno.ENOSYS, "no rename here")


class CopyingRename(Disk):
    def rename(self, source, target):
        target.write_bytes(source.read_bytes())


class NoExclusion(Disk):
    def link(self, source, target):
        raise OSError(errno.EPERM, "no links here")

    def create(self, path):
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)


class NoLinks(Disk):
    """Nor can it put a folder's names on stable storage."""

    def __init__(self, number):
        self.number = number

    def link(self, source, target):
        raise OSError(self.number, os.strerror(self.number))

    def fsync_folder(self, path):
        raise OSError(self.number, os.strerror(self.number))


class Full(Disk):
    def write(self, path, descriptor, block, first_byte):
        raise OSError(errno.ENOSPC, "No space left on device")


class NoFolderSync(Disk):
    def sync_folder(self, path):
        raise OSError(errno.EIO, "Input/output error")


def attached(place, disk, mode="auto"):
    """Attach to a place on such a disk."""
    channel = local_store(World(0, 1, 0, "here"))
    return attach(LocalTier(place, disk), channel, [RankLocation("here", "")], mode, by_name=False)


@pytest.mark.parametrize(
    ("disk", "why"),
    [
        (NoRename(), "rename does not replace"),
        (CopyingRename(), "rename does not replace"),
        (NoExclusion(), "two processes can create one file"),
    ],
)
def test_a_place_where_commits_cannot_be_atomic_is_refused_with_the_line_to_change(
    tmp_path, disk, why
):
    with pytest.raises(ConfigurationError, match=why) as caught:
        attached(tmp_path / "run", disk)
    assert 'Checkpointer("/path/on/another/file/system"' in caught.value.hint
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["EPERM", "ENOSYS", "EXDEV", "EMLINK", "ENOTSUP", "EINVAL", "ENOLCK", "EBADF"]
)
def test_a_place_found_fit_without_links_and_synced_folders_takes_a_run(tmp_path, name):
    disk = NoLinks(getattr(errno, name))
    _, found = attached(tmp_path / "run", disk)
    assert (found["create_only"], found["folder_sync"]) == ("exclusive", False)
    tier = LocalTier(tmp_path / "run", disk)
    assert [tier.create("run.json", b"1"), tier.create("run.json", b"2")] == [True, False]


class DeniesLinks(Disk):
    """As some file servers: a file can be created in a folder, and gets no second name."""

    def link(self, source, target):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_place_that_denies_links_takes_a_run(tmp_path):
    _, found = attached(tmp_path / "run", DeniesLinks())
    assert found["create_only"] == "exclusive"
    tier = LocalTier(tmp_path / "run", DeniesLinks())
    assert [tier.create("run.json", b"1"), tier.create("run.json", b"2")] == [True, False]


class Closed(Disk):
    """Takes no new file in one of the run's folders, as another user's."""

    def __init__(self, folder):
        self.folder = folder

    def create(self, path):
        if path.parent.name == self.folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return super().create(path)


@pytest.mark.parametrize("folder", ["attempts", "snapshots"])
def test_a_run_whose_folders_take_no_file_is_refused_before_anything_is_claimed(
    trained, tmp_path, folder
):
    shutil.copytree(trained, tmp_path / "run")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(TierUnavailable, match=f"cannot write {tmp_path}/run/{folder}/"):
        attached(tmp_path / "run", Closed(folder))
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("disk", [Full(), NoFolderSync()])
def test_a_place_that_is_ill_is_unavailable(tmp_path, disk):
    with pytest.raises(TierUnavailable, match=str(tmp_path)):
        attached(tmp_path / "run", disk)


# ---- the place by name


def test_a_run_can_be_named_by_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCKPT_RUN", str(tmp_path / "named"))
    assert places.open_run_tier(None).root == tmp_path / "named"
    assert places.open_run_tier(tmp_path / "own").root == tmp_path / "own"


def test_a_run_that_nobody_named_is_refused_with_both_ways_to_name_it():
    with pytest.raises(ConfigurationError, match="no run directory") as caught:
        places.open_run_tier(None)
    assert 'Checkpointer("runs/x"' in caught.value.hint
    assert "trainckpt run --run" in caught.value.hint


def test_a_crash_loop_leaves_one_record_an_attempt_and_no_rubbish(tmp_path):
    for _ in range(3):
        with pytest.raises(Crash):
            attempt(tmp_path / "run", crash_at=1)
    names = sorted(path.name for path in (tmp_path / "run" / "attempts").iterdir())
    assert names == ["1.json", "2.json", "3.json"]
    assert not (tmp_path / "run" / "probe").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["id"]
