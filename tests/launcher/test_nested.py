"""A supervisor within another one's launch: `trainckpt run` of a script that calls it too."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.limits import HANG_S
from trainckpt.attempt import status_files
from trainckpt.launcher import nested
from trainckpt.launcher.nested import Nested
from trainckpt.launcher.supervise import supervise
from trainckpt.launcher.supervisor_record import NamedRun

RANKS = str(Path(__file__).with_name("ranks.py"))
STOPS = """
    block(); tell(rank, state="claimed", grace_s=grace); ready("ready"); heard("heard")
    tell(rank, state="left", how="stopped", exit_code=code); sys.exit(code)
"""
INNER = """
    import sys
    from trainckpt.launcher.supervise import supervise
    sys.exit(supervise([sys.executable, *sys.argv[1:]], ours=True).exit_code)
"""


@pytest.fixture
def job(tmp_path):
    """Supervise a shell's text, in which `$INNER` supervises one rank; act once that is ready."""

    def run(text: str, act=lambda: None, rank: str = STOPS, *, grace=None, code=75, **more):
        script, folder = tmp_path / "job.sh", str(tmp_path)
        script.write_text(text)
        words = f"grace, code = {grace!r}, {code}\n" + textwrap.dedent(rank)
        environment = {
            "PYTHON": sys.executable,
            "INNER": textwrap.dedent(INNER),
            "RANKS": RANKS,
            "FOLDER": folder,
            "RANK_TEXT": words,
        }

        def watch(process):
            until = time.monotonic() + HANG_S
            while not (tmp_path / "ready").exists():
                assert process.poll() is None, "it ended before it was ready"
                assert time.monotonic() < until
                time.sleep(0.005)
            act()

        command = ["sh", str(script)]
        return supervise(command, environment=environment, watch=watch, ours=True, **more)

    return run


CALL = '"$PYTHON" -c "$INNER" "$RANKS" "$FOLDER" "$RANK_TEXT"'


def to_us(number=signal.SIGTERM):
    return lambda: os.kill(os.getpid(), number)


def test_a_signal_is_handed_on_to_a_supervisor_within_and_its_code_passes_through(job, tmp_path):
    """Its ranks tell it alone; they are not killed as if nobody listened."""
    ended = job(f"exec {CALL}\n", to_us())
    assert (tmp_path / "heard").exists()
    assert (ended.exit_code, ended.why, ended.within) == (75, "stopped", True)


def test_what_lies_between_may_make_another_code_of_a_stop(job):
    """As `make` does, which ends with 2 whatever failed."""
    assert job(f"{CALL} || exit 2\n", to_us(), max_restarts=3).exit_code == 75


def test_what_a_script_starts_after_a_signal_is_to_stop_too(job, tmp_path):
    """It has gone on to the next command, as one does that looks at no exit code."""
    ended = job(f'{CALL}; {CALL}; echo over >"$FOLDER/over"\n', to_us())
    assert ended.exit_code == 75
    assert (tmp_path / "over").exists()


def test_a_script_may_answer_for_a_stop_that_no_signal_brought(job):
    """A pause of the run within, of which the script makes an end in order."""
    stops = 'tell(rank, state="left", how="stopped", exit_code=75); ready("ready"); sys.exit(75)'
    assert job(f"{CALL} || exit 0\n", rank=stops).exit_code == 0
    assert job(f"{CALL} || exit 2\n", rank=stops).exit_code == 75


def test_a_second_interrupt_ends_the_ranks_within_at_once_with_130(job, tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        while not (tmp_path / "heard").exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    deaf = (
        'block(); tell(rank, state="claimed"); ready("ready"); heard("heard", 2); time.sleep(600)'
    )
    begun = time.monotonic()
    assert job(f"exec {CALL}\n", twice, rank=deaf).exit_code == 130
    assert time.monotonic() - begun < HANG_S


def test_the_grace_of_the_ranks_within_is_kept(job, tmp_path):
    """By the supervisor within; by the outer one, where that one hangs."""
    deaf = 'block(); tell(rank, state="claimed", grace_s=grace); ready("ready"); time.sleep(600)'
    assert job(f"exec {CALL}\n", to_us(), rank=deaf, grace=1.0).exit_code == 71
    (tmp_path / "ready").unlink()
    hangs = deaf.replace(
        "time.sleep(600)",
        textwrap.dedent("""
        at = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
        os.kill(at, signal.SIGSTOP); time.sleep(600)"""),
    )
    begun = time.monotonic()
    ended = job(f"exec {CALL}\n", to_us(), rank=hangs, grace=2.0)
    assert ended.exit_code == 71
    assert time.monotonic() - begun < HANG_S


class CountedLooks(NamedRun):
    """Claims at the first look after `claims_now`."""

    looks = 0

    def observe(self, *arguments, **options):
        super().observe(*arguments, **options)
        self.looks += 1

    def claims_now(self):
        """Return after a whole look at which a claim was due."""
        self._claim_after_s, before = 0.0, self.looks
        while self.looks < before + 2:
            time.sleep(0.005)


def test_no_attempt_is_claimed_beside_those_of_the_ranks_within(job, tmp_path):
    """`--run` tells them where the run lies, and they do not tell the outer supervisor."""
    named = CountedLooks(str(tmp_path / "run"), ["sh"], None, 1)
    named._claim_after_s = math.inf  # until the supervisor within has told of itself

    def act():
        named.claims_now()
        to_us()()

    ended = job(f"exec {CALL}\n", act, name=lambda: named)
    assert (ended.exit_code, ended.record, named.record) == (75, None, None)


def test_the_command_itself_is_no_script_that_trains(tmp_path):
    """It imports trainckpt, as scripts do."""
    environment = {**os.environ, status_files.SUPERVISOR_VARIABLE: str(tmp_path)}
    subprocess.run(
        [sys.executable, "-m", "trainckpt", "--version"],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert not status_files.has_imported(tmp_path)
    subprocess.run([sys.executable, "-c", "import trainckpt"], env=environment, check=True)
    assert status_files.has_imported(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"pid": "1", "namespace": ""}',
        "[" * 9000,
        '{"pid": 1, "namespace": "", "exit_code": -1}',
    ],
)
def test_a_word_that_is_none_has_said_nothing(tmp_path, text):
    (tmp_path / "nested-1.json").write_text(text)
    (tmp_path / "nested-2.json").write_text('{"pid": 2, "namespace": "n", "exit_code": 75}')
    (found,) = nested.read(tmp_path)
    assert (found.pid, found.exit_code) == (2, 75)


def test_the_last_word_is_the_last(tmp_path, monkeypatch):
    """Of two that a script called one after the other."""
    monkeypatch.setenv(status_files.SUPERVISOR_VARIABLE, str(tmp_path))
    for pid, at in ((7, 200), (8, 100)):
        file = tmp_path / f"nested-{pid}.json"
        file.write_text(f'{{"pid": {pid}, "namespace": ""}}')
        os.utime(file, (at, at))
    assert nested.read(tmp_path) == [Nested(8, "", at=100), Nested(7, "", at=200)]
