"""Ranks die of a snapshot without a word: those that torchrun starts then take another."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests import warm
from tests.campaign import launch
from tests.elastic.agents import ENVIRONMENT, TORCHRUN
from tests.end_to_end.training import record, usable
from tests.limits import HANG_S
from trainckpt.resume.silent_deaths import REASON

DEADLY = "tests.end_to_end.deadly"
SAID = "skipped snapshot s4~1.2: 2 attempts died on it, so it is tried last"
FIXED = ["--standalone"]
ELASTIC = [
    *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    *("--rdzv-conf", "last_call_timeout=1", "--local-addr", "localhost"),
]


def restarted(place, options, restarts, death):
    """Train up to step 6 under torchrun; return what its ranks said."""
    command = [*TORCHRUN, *options, "--max-restarts", str(restarts), "-m", DEADLY, place, "6"]
    done = subprocess.run(
        [*map(str, command), *death],
        cwd=warm.ROOT,
        env={**os.environ, **launch.environment(), **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.fixture
def run(tmp_path, server):
    """A run whose first attempt was lost after four steps."""
    words = ["-m", DEADLY, str(tmp_path / "run"), "4", "-", "-", "-"]
    assert warm.run(server, words).returncode == -9
    assert usable(tmp_path / "run") == ["s2~1.1", "s4~1.2"]
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("options", "ranks", "when"),
    [
        (ELASTIC, 1, "reading"),
        pytest.param(ELASTIC, 2, "applying", marks=pytest.mark.long),
        pytest.param(FIXED, 1, "applying", marks=pytest.mark.long),
        pytest.param(FIXED, 2, "reading", marks=pytest.mark.long),
    ],
)
def test_after_two_silent_deaths_torchrun_s_third_start_takes_the_older_snapshot(
    run, options, ranks, when
):
    number = [f"--nproc-per-node={ranks}"]
    said = restarted(run, [*number, *options], 2, ["s4", when, "SIGKILL"])
    assert SAID in said
    assert record(run, 4)["parent"] == "s2~1.1"
    ends = [record(run, attempt)["outcome"] for attempt in (2, 3)]
    assert [(end["outcome"], end["reason"]) for end in ends] == [("killed", REASON)] * 2


@pytest.mark.long
def test_deaths_of_agents_with_their_ranks_are_no_fault_of_the_snapshot(run):
    """A machine that is taken away leaves no agent that would know more."""
    for _ in range(2):
        assert SAID not in restarted(run, ELASTIC, 0, ["s4", "reading", "SIGKILL"])
    assert SAID not in restarted(run, ELASTIC, 0, ["-", "-", "-"])
    assert record(run, 4)["parent"] == "s4~1.2"
    assert record(run, 3)["outcome"] is None
