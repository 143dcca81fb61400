"""Little shared memory, a small cgroup, no O_DIRECT: slower, exact, and said. Never SIGBUS.

The mounts and the cgroup are real, so they need root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import cgroup

ROOT = Path(__file__).parents[2]
PROBE = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt && mount -t ramfs ramfs /mnt"]
# From the first byte on, what is freed is given back: else how much a training takes is chance.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def can_mount():
    tools = all(shutil.which(tool) for tool in ("unshare", "mount"))
    return tools and subprocess.run(PROBE, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Every case, one after the other in one process."""
    if os.geteuid() != 0 or not can_mount():
        pytest.skip("needs root, and to be allowed to mount")
    why = cgroup.why_not()
    cases = ["straight", "small_shm", "full_shm", "no_direct", *([] if why else ["small_cgroup"])]
    command = [
        sys.executable,
        "-m",
        "tests.faults.scarce_resources",
        str(tmp_path_factory.mktemp("scarce")),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRAINCKPT_")}
    ended = subprocess.run(
        ["unshare", "-m", "--propagation", "private", *command, *cases],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**environment, **MALLOC},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return {"no cgroup": why, **json.loads(ended.stdout)}


def log_of_exact(case, straight):
    """What was logged in a case in which the run was killed, went on, and ended as it should."""
    assert case["ended"] == [-signal.SIGKILL, 0], case["log"]
    assert case["digest"] == straight
    assert "this resume is bitwise" in case["log"]
    return case["log"]


PRIVATE = "of private memory, so no copy outlives the process: /dev/shm has no room for them"


def test_with_64_mb_of_shared_memory_private_memory_is_used_and_read_back_from_the_place(ran):
    log = log_of_exact(ran["small_shm"], ran["straight"]["digest"])
    assert log.count(f"are laid out in 2 x 12.1 MB {PRIVATE}") == 2
    assert "docker run --shm-size=8g" in log
    assert "was read from memory" not in log


def test_shared_memory_that_others_fill_is_left_when_more_is_needed(ran):
    log = log_of_exact(ran["full_shm"], ran["straight"]["grown"])
    first, found, _ = log.partition(PRIVATE)
    assert "1 x " in first
    assert "of shared memory" in first
    assert "of private memory" not in first
    assert found


def test_in_a_small_cgroup_no_more_is_taken_than_the_training_leaves(ran):
    if "small_cgroup" not in ran:
        pytest.skip(f"no cgroup can be made here: {ran['no cgroup']}")
    log = log_of_exact(ran["small_cgroup"], ran["small_cgroup"]["straight"])
    assert log.count("training waits while each file is written") == 2


def test_a_file_system_that_refuses_o_direct_is_written_through_the_cache(ran):
    log = log_of_exact(ran["no_direct"], ran["straight"]["digest"])
    assert "ramfs/run refuses O_DIRECT (Invalid argument): files there go through the page" in log
