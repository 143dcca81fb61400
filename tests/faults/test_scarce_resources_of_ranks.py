"""Two ranks under `trainckpt run` where a machine is tight: one dies once, the run ends exactly.

The file system and the cgroup are real, so they need root.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import cgroup, dead_mount, refusing
from tests.faults.scarce_resources_script import DIES_AT
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE

SCRIPT = Path(__file__).parent / "scarce_resources_script.py"


OWN_MOUNTS = ["unshare", "--mount", "--propagation", "private"]
SMALL_SHM = "mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm"


def log_of_exact(place, answers, mb, first="", last="", inside=(), **environment):
    """What was said in a run that lost a rank, went on by itself, and ended as it should.

    `first`, `last`: lines of the shell, before and after the launch; `inside`: what runs it.
    """
    answers.mkdir()
    command = [
        sys.executable,
        "-m",
        "trainckpt.cli.main",
        "run",
        "--nproc",
        "2",
        "--max-restarts",
        "1",
        "--",
        SCRIPT,
        place,
        mb,
        answers,
    ]
    known = {k: v for k, v in os.environ.items() if not k.startswith("TRAINCKPT_")}
    line = f"{first or ':'} && {shlex.join(map(str, command))} && {last or ':'}"
    ended = subprocess.run(
        [*inside, "sh", "-c", line],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=SCRIPT.parents[2],
        env={**known, **environment},
    )
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        found = json.loads((answers / f"{rank}.json").read_text())
        assert found["run"] == found["straight"]
        assert found["from"] == DIES_AT
    assert "rank 1 died of SIGKILL; restart 1 of 1" in ended.stderr
    assert "this resume is bitwise" in ended.stderr
    return ended.stderr


def why_not_mount():
    """Why a file system cannot be mounted for some processes alone, or ""."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root, and unshare"
    probe = [*OWN_MOUNTS, "sh", "-c", SMALL_SHM]
    can = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return "" if can else "nothing may be mounted here"


@pytest.mark.long
@pytest.mark.skipif(bool(dead_mount.why_not()), reason=dead_mount.why_not())
def test_a_file_system_that_takes_o_direct_and_refuses_it_at_write_is_written_through_the_cache(
    tmp_path,
):
    """The trial of the place found nothing; shard files are written, and read, all the same.

    tests/storage/test_file_writer.py and test_file_reader.py have the same for one file.
    """
    place = tmp_path / "place"
    with refusing.mounted(place, tmp_path / "backing"):
        run = place / "run"
        log = log_of_exact(run, tmp_path / "answers", 8, **{ROOT_VARIABLE: NONE})
        record = json.loads((run / "attempts" / "2.json").read_text())
    assert record["place"]["direct"]
    said = f"{run} refuses O_DIRECT (Invalid argument): files there go through the page cache"
    first, _, second = log.partition("restart 1 of 1")
    assert first.count(said) == second.count(said) == 2  # once for each rank


@pytest.mark.skipif(bool(why_not_mount()), reason=why_not_mount())
def test_with_64_mb_of_shared_memory_saves_lie_in_the_ranks_own_and_the_place_is_read(
    tmp_path,
):
    """Nothing is left of it, once the run is over."""
    left = tmp_path / "left"
    log = log_of_exact(
        tmp_path / "run",
        tmp_path / "answers",
        8,
        SMALL_SHM,
        f"find /dev/shm -mindepth 2 > {left}",
        OWN_MOUNTS,
    )
    said = "are laid out in 2 x 12.1 MB of private memory, so no copy outlives the process: "
    first, _, second = log.partition("restart 1 of 1")
    for part in (first, second):
        assert f"{said}/dev/shm has no room for them (docker run --shm-size=8g" in part
    assert "was read from memory" not in second
    assert left.read_text() == ""


@pytest.mark.long
@pytest.mark.skipif(bool(cgroup.why_not()), reason=f"no cgroup can be made: {cgroup.why_not()}")
def test_in_a_cgroup_of_2_gb_that_training_nearly_fills_nobody_is_killed_for_memory(tmp_path):
    """1.6 GB of training; arenas would take 0.75 GB more, and reading ahead for a resume 0.38.

    tests/faults/test_scarce_resources.py has the same for one rank, and a smaller group.
    """
    with cgroup.made(2 << 30) as group:
        enter = f"echo $$ > {group.folder / 'cgroup.procs'}"
        log = log_of_exact(tmp_path / "run", tmp_path / "answers", 125, enter)
        killed, peak = group.num_killed, group.peak_bytes
    assert killed == 0
    assert peak > 3 << 29, "else it was no small group"
    assert log.count("exceed memory_budget or the free memory") == 4  # each rank, each attempt
    assert "was read from memory" not in log
