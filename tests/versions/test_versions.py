"""The core's tests, and a proof on two ranks, with the oldest torch and the newest Python."""

from __future__ import annotations

import subprocess

import pytest

from tests.versions import debian

CORE = ("attempt", "data", "format", "inspect", "resume", "run_directory", "save", "snapshot")
CORE += ("state", "stop")
LEFT_OUT = {  # torch 2.6 has no FSDP2 on CPUs
    "trixie": [
        "--deselect=tests/inspect/test_load.py::test_whole_and_sharded_are_read_into_each_other",
        "--ignore=tests/state/test_fsdp.py",
    ],
    "forky": [],
}
LIMIT_S = 3000.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_S + 600)]


def run_in(release, *words):
    """Run a command in a release; return its output, or fail with it."""
    if reason := debian.why_not():
        pytest.skip(reason)
    command = debian.command_in(release, "python3", "-m", *words)
    done = subprocess.run(command, text=True, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-5000:]}"
    return done.stdout


@pytest.mark.parametrize("release", debian.PYTHON)
def test_the_core_s_tests_pass(release):
    words = ["pytest", "-q", "-p", "no:cacheprovider"]
    words += ["--ignore=tests/save/test_growth.py"]  # it starts rclone, which is not in a release
    words += LEFT_OUT[release]
    for warning in ("ignore::FutureWarning", "ignore:This process:DeprecationWarning"):
        words += ["-W", warning]
    run_in(release, *words, *(f"tests/{name}" for name in CORE))


@pytest.mark.parametrize("release", debian.PYTHON)
def test_workers_that_are_not_forked_go_on_bitwise(release):
    """Python 3.14 starts them by a fork server, unless it is told otherwise."""
    words = ("pytest", "-q", "-p", "no:cacheprovider", "-m", "long")
    said = run_in(release, *words, "tests/end_to_end/test_worker_starts.py")
    assert "3 passed" in said


@pytest.mark.parametrize("release", debian.PYTHON)
def test_two_ranks_are_proved_to_resume_bitwise(release):
    words = (
        "prove",
        "--nproc",
        "2",
        "--stops",
        "2",
        "--",
        "examples/char_gpt.py",
        "--size",
        "small",
    )
    how = ("--parallel", "ddp", "--steps", "8", "--accumulate", "3", "--workers", "2")
    said = run_in(release, "trainckpt", *words, *how, "--save-every", "3", "--dropout", "0.1")
    assert "bitwise" in said
