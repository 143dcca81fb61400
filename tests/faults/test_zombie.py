"""A zombie: an attempt that goes on, and commits, after a newer one has begun."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.end_to_end.training import catalog, record
from tests.faults import zombies
from tests.faults.zombies import Attempt
from tests.limits import HANG_S
from tests.ranks.processes import context, preload
from trainckpt.cli.main import main
from trainckpt.snapshot.catalog import ABANDONED
from trainckpt.snapshot.verify import verify
from trainckpt.storage.local import LocalTier

preload("tests.faults.zombies")


def fainted(process):
    """Return once the process has been stopped."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        assert process.is_alive(), process.exitcode
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.005)
    raise AssertionError("it never came to that moment")


def files_of(place, number):
    """Everything that belongs to an attempt, and to the run, byte for byte."""
    found = [place / "run.json", place / "attempts" / f"{number}.json"]
    found += (place / "snapshots").glob(f"*~{number}.*/*")
    return {str(path): path.read_bytes() for path in found}


@pytest.fixture
def asleep(tmp_path, request):
    """A zombie in its sleep; called, it wakes up, and has ended when the call returns."""
    process = context.Process(target=zombies.zombie, args=(str(tmp_path), request.param))
    process.start()

    def wake():
        os.kill(process.pid, signal.SIGCONT)
        process.join(HANG_S)
        return process.exitcode

    fainted(process)
    yield wake
    process.kill()
    process.join()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("asleep", zombies.MOMENTS, indirect=True)
def test_an_attempt_that_wakes_up_late_damages_nothing_whatever_it_was_doing(
    tmp_path, capsys, asleep
):
    newer = Attempt(tmp_path, seed=1)
    began = newer.ckpt.resumed_from.step
    newer.train(3)
    newer.ckpt.close()
    before = files_of(tmp_path, 2)
    assert asleep() == 0
    assert files_of(tmp_path, 2) == before
    assert record(tmp_path, 2)["outcome"]["outcome"] == "finished"

    found = catalog(tmp_path)
    usable = [c for c in found if c.usable and c.name.attempt == 2]
    assert [c.name.step for c in usable] == [began + 3] * 2  # the last step, and the end
    assert all(copy.ok for c in usable for copy in verify(LocalTier(tmp_path), c.manifest))
    late = [c for c in found if c.name.attempt == 1 and c.name.step > began]
    assert late[0].name.step == 7
    assert {c.reason for c in late} == {ABANDONED}

    assert main(["list", str(tmp_path), "--json"]) == 0
    listed = {c["name"]: c for c in json.loads(capsys.readouterr().out)["candidates"]}
    assert "abandoned branch" in listed[str(late[0].name)]["reason"]
    assert not listed[str(late[0].name)]["usable"]

    third = Attempt(tmp_path, seed=2)
    assert record(tmp_path, 3)["parent"] == str(usable[0].name)
    assert torch.equal(third.model.weight, newer.model.weight)
    third.ckpt.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("asleep", ["training", "committing"], indirect=True)
def test_a_newer_attempt_that_still_trains_is_not_disturbed(tmp_path, asleep):
    newer = Attempt(tmp_path, seed=1)
    began = newer.ckpt.resumed_from.step
    newer.train(1)
    assert asleep() == 0
    held = {str(c.name) for c in catalog(tmp_path) if c.usable}
    assert f"s{began + 1}~2.1" in held
    newer.train(1)
    newer.ckpt.close()
    third = Attempt(tmp_path, seed=2)
    assert third.ckpt.resumed_from.step == began + 2
    assert torch.equal(third.model.weight, newer.model.weight)
    third.ckpt.close()


def test_what_a_zombie_commits_is_an_abandoned_branch_that_nobody_resumes_from(tmp_path):
    zombie = Attempt(tmp_path, seed=0)
    zombie.train(2)
    newer = Attempt(tmp_path, seed=1)
    assert newer.ckpt.resumed_from.step == 2
    newer.train(1)
    zombie.train(5)  # farther than the newer one will ever get
    branches = {str(c.name): c.reason for c in catalog(tmp_path)}
    assert branches["s7~1.7"] == ABANDONED
    assert branches["s3~2.1"] == ""
    newer.train(1)
    newer.ckpt.close()
    zombie.ckpt.close()
    third = Attempt(tmp_path, seed=2)
    assert third.ckpt.resumed_from.step == 4
    assert record(tmp_path, 3)["parent"].split("~")[1].startswith("2.")
    assert torch.equal(third.model.weight, newer.model.weight)
    assert not torch.equal(third.model.weight, zombie.model.weight)
    third.ckpt.close()


def test_a_zombie_deletes_nothing_of_the_newer_attempt_and_says_what_it_is(tmp_path, caplog):
    zombie = Attempt(tmp_path, seed=0)
    zombie.train(2)
    newer = Attempt(tmp_path, seed=1)
    newer.train(1)
    held = {str(c.name) for c in catalog(tmp_path) if c.usable}
    with caplog.at_level("WARNING", "trainckpt"):
        zombie.train(4)  # more than keep_last
    said = [line for line in caplog.messages if "attempt 2 of this run has begun" in line]
    assert len(said) == 1
    assert held <= {str(c.name) for c in catalog(tmp_path) if c.usable}
    newer.ckpt.close()
    zombie.ckpt.close()
