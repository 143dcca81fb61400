"""A snapshot that kills whoever loads it is passed over after two deaths, and never dropped."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.end_to_end.training import record, usable
from trainckpt.format.attempt_record import ENDED, RUNNING, STARTING, UNDECIDED, AttemptRecord
from trainckpt.launcher.supervise import supervise
from trainckpt.resume.candidate_order import died_on, lost_since

ROOT = Path(__file__).parents[2]
VARIABLES = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def words(tmp_path, steps, death):
    return ["-m", "tests.end_to_end.deadly", str(tmp_path / "run"), str(steps), *death] + (
        [] if death else ["-", "-", "-"]
    )


def start(tmp_path, steps, *death):
    """One supervised attempt; its exit code and what it said."""
    said = tmp_path / "said"
    command = [sys.executable, *words(tmp_path, steps, death)]
    with said.open("wb") as output:
        ended = supervise(command, environment=VARIABLES, output=output, cwd=str(ROOT))
    return ended.exit_code, said.read_text()


@pytest.fixture
def alone(server):
    """One attempt that nobody supervises; its exit code and what it said."""

    def start(tmp_path, steps, *death):
        done = warm.run(server, words(tmp_path, steps, death), together=True)
        return done.returncode, done.stdout

    return start


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run whose first attempt was lost after four steps."""
    folder = tmp_path_factory.mktemp("begun")
    code, said = start(folder, 4)
    assert code == 137, said
    assert usable(folder / "run") == ["s2~1.1", "s4~1.2"]
    outcome = record(folder / "run", 1)["outcome"]
    assert (outcome["outcome"], outcome["died_while"]) == ("killed", "running")
    return folder / "run"


@pytest.fixture
def lost(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize(
    ("when", "how", "code"),
    [
        ("reading", "SIGSEGV", 139),
        ("applying", "SIGABRT", 134),
        pytest.param("reading", "SIGKILL", 137, marks=pytest.mark.long),
        pytest.param("applying", "3", 3, marks=pytest.mark.long),
    ],
)
def test_after_two_deaths_the_third_attempt_takes_the_older_one_and_says_so(
    lost, alone, when, how, code
):
    run = lost / "run"
    for number in (2, 3):
        ended, said = start(lost, 6, "s4", when, how)
        assert ended == code, said
        ours = record(run, number)
        assert ours["reading"] == "s4~1.2"
        assert ours["parent"] == ("undecided" if when == "reading" else "s4~1.2")
    ended, said = alone(lost, 6, "s4", when, how)
    assert "skipped snapshot s4~1.2: 2 attempts died on it, so it is tried last" in said
    assert "resumed from s2~1.1" in said
    assert record(run, 4)["parent"] == "s2~1.1"
    assert usable(run) == ["s2~1.1", "s4~4.1", "s6~4.2"]


def test_without_a_supervisor_a_crash_in_native_code_leaves_last_words(lost, alone):
    """And only a crash: a file that stays empty is removed, a SIGKILL counts for nothing."""
    run = lost / "run"
    for when in ("reading", "applying"):
        ended, said = alone(lost, 6, "s4", when, "SIGSEGV")
        assert ended == -11, said
    words = sorted((run / "attempts").glob("*.fault"))
    assert [path.name for path in words] == ["2.rank0.fault", "3.rank0.fault"]
    assert "Segmentation fault" in words[0].read_text()
    assert words[0].stat().st_mode & 0o777 == 0o600
    ended, said = alone(lost, 6, "s4", "reading", "SIGKILL")
    assert "skipped snapshot s4~1.2: 2 attempts died on it" in said
    assert ended == -9
    assert "resumed from s2~1.1" in said


def test_it_stays_the_last_resort(lost, alone):
    for _ in range(2):
        start(lost, 6, "s4", "applying", "SIGSEGV")
    shutil.rmtree(lost / "run" / "snapshots" / "s2~1.1")
    _, said = alone(lost, 6)
    assert "resumed from s4~1.2" in said


def test_deaths_without_a_word_and_without_a_supervisor_are_no_fault_of_the_snapshot(lost, alone):
    """A preemption: whoever takes the machine away kills all there is, and says nothing."""
    for _ in range(2):
        assert alone(lost, 6, "s4", "applying", "SIGKILL")[0] == -9
    _, said = alone(lost, 6)
    assert "resumed from s4~1.2" in said
    assert "died on it" not in said


def record_of(how="killed", code=139, *, parent="s4~1.2", state=ENDED, **more):
    facts = more.pop("facts", {})
    return AttemptRecord(2, parent, state, {"outcome": how, "exit_code": code, **more}, facts=facts)


READ = {"parent": UNDECIDED, "facts": {"reading": "s4~1.2"}}


@pytest.mark.parametrize(
    ("attempt", "counts"),
    [
        (record_of(died_while=STARTING), True),
        (record_of(died_while=STARTING, **READ), True),
        (record_of(died_while=STARTING, code=137), True),
        # a boundary was passed; somebody wanted it to end; an older supervisor wrote it
        (record_of(died_while=RUNNING), False),
        (record_of(died_while=None), False),
        (record_of(), False),
        (record_of(died_while=STARTING, code=143), False),
        # it began from another one
        (record_of(died_while=STARTING, parent="s2~1.1"), False),
        (record_of(died_while=STARTING, parent="s2~1.1", facts={"reading": "s4~1.2"}), False),
        # its own exception, before and after a boundary
        (record_of("failed", 1, state=STARTING), True),
        (record_of("failed", 1, state=STARTING, **READ), True),
        (record_of("failed", 1, state=RUNNING), False),
        (record_of("failed", 1, state=STARTING, reason="KeyboardInterrupt()"), False),
        # the script does not fit, the place does not answer, the bytes are bad: said elsewhere
        *[(record_of("failed", code, state=STARTING), False) for code in (65, 69, 71, 78)],
        (record_of("stopped", 75), False),
        (AttemptRecord(2, "s4~1.2", STARTING), False),
    ],
)
def test_which_ends_count_as_deaths_on_a_snapshot(attempt, counts):
    assert died_on({2: attempt}, "s4~1.2") == counts


@pytest.mark.parametrize(
    ("ends", "lost"),
    [
        ([record_of("stopped", 75, snapshot="s4~1.2", lost_micro_batches=0)], 0),
        ([record_of("failed", 1, state=RUNNING, snapshot="s4~1.2", lost_micro_batches=3)], 3),
        # what died before it trained lost nothing, so the loss before it stands
        (
            [
                record_of("failed", 1, state=RUNNING, snapshot="s4~1.2", lost_micro_batches=3),
                record_of(died_while=STARTING, snapshot="s4~1.2"),
            ],
            3,
        ),
        # nor did one that was stopped where it began
        (
            [
                record_of("failed", 1, state=RUNNING, snapshot="s4~1.2", lost_micro_batches=3),
                record_of("stopped", 75, snapshot="s4~1.2", lost_micro_batches=0),
            ],
            3,
        ),
        ([record_of(died_while=RUNNING, snapshot="s4~1.2", lost_micro_batches=None)], None),
        ([record_of("stopped", 75, snapshot="s5~1.3", lost_micro_batches=0)], None),
        ([AttemptRecord(1, None, RUNNING)], None),
        ([], None),
    ],
)
def test_what_was_lost_since_a_snapshot_is_said_where_it_is_known(ends, lost):
    assert lost_since(dict(enumerate(ends, 1)), "s4~1.2") == lost
