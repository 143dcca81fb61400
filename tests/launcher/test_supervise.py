"""The supervisor over real processes: signals, codes, records, and that nobody is left behind.

The children are small Python programs without torch; they tell where their record lies as a
Checkpointer would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial

import pytest

from tests.limits import HANG_S
from trainckpt import Checkpointer, NothingToResume
from trainckpt.attempt.status_files import (
    SUPERVISOR_VARIABLE,
    RankStatusWriter,
    namespace_of,
    read_rank_statuses,
)
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.launcher import processes, supervisor_record
from trainckpt.launcher.outcome import Outcome
from trainckpt.launcher.supervise import supervise
from trainckpt.launcher.supervisor_record import NamedRun
from trainckpt.launcher.supervisor_signals import Inbox
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history

READY = "open(sys.argv[1], 'w').close()"
# A process in a session of its own, as torchrun starts its ranks; its id goes into a file.
ORPHAN = """
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); "
                               "time.sleep(600)"], start_new_session=True)
    open(sys.argv[2], "w").write(str(orphan.pid))
"""


@pytest.fixture
def program(tmp_path):
    """Supervise a program's text; `when_ready` is called once it has said that it is."""
    ready, orphan = tmp_path / "ready", tmp_path / "orphan"

    def run(text: str, when_ready=None, **more):
        def watch(process):
            until = time.monotonic() + HANG_S
            while not ready.exists():
                assert process.poll() is None, "it ended before it was ready"
                assert time.monotonic() < until
                time.sleep(0.005)
            when_ready()

        imports = "import json, os, signal, subprocess, sys, time\n"
        command = [sys.executable, "-c", imports + textwrap.dedent(text), str(ready), str(orphan)]
        environment = {key: more.pop(key) for key in tuple(more) if key.isupper()}
        return supervise(
            command,
            environment=environment,
            watch=watch if when_ready is not None else None,
            **more,
        )

    run.orphan = lambda: int(orphan.read_text())
    return run


_heard: list[int] = []


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """What was heard in this test is counted."""
    hear = Inbox._hear
    _heard.clear()

    def counted(self, number, frame):
        hear(self, number, frame)
        _heard.append(number)

    monkeypatch.setattr(Inbox, "_hear", counted)


def send(*numbers: int):
    """Send signals to this process: the supervisor. Two that wait at once would be one."""

    def to_us() -> None:
        for count, number in enumerate(numbers, 1):
            os.kill(os.getpid(), number)
            until = time.monotonic() + HANG_S
            while len(_heard) < count and time.monotonic() < until:
                time.sleep(0.005)

    return to_us


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def goes(pid: int) -> bool:
    """Whether it ends: who was sent SIGKILL and is nobody's child ends when the kernel has time."""
    until = time.monotonic() + 30.0
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not lives(pid)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_codes_of_a_command_without_a_checkpointer_pass_through(program, code):
    """There is no record that could say otherwise."""
    ended = program(f"sys.exit({code})")
    assert (ended.exit_code, ended.record) == (code, None)


def test_a_command_that_died_of_a_signal_has_the_code_that_shells_give():
    """128 and the signal's number."""
    ended = supervise([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert ended.exit_code == 137


@pytest.mark.parametrize(
    "sent",
    [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT],
)
def test_a_command_without_a_checkpointer_gets_every_signal_as_it_is(program, sent):
    """Once, and it decides how it ends."""
    text = f"""
        signal.signal({int(sent)}, lambda *_: sys.exit(7))
        {READY}
        time.sleep(60)
    """
    before = signal.getsignal(sent)
    assert program(text, send(sent)).exit_code == 7
    assert signal.getsignal(sent) is before


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    """And so does the interrupt of a shell's background job."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (1, 2)}
    try:
        with Inbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGINT)
            assert not inbox.signalled
            os.kill(os.getpid(), signal.SIGTERM)
            assert inbox.signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_interrupt_leaves_at_once_with_130_and_leaves_nobody(program):
    """Whoever ignores the first one, rank or launcher, is killed by the second."""
    text = "signal.signal(signal.SIGINT, signal.SIG_IGN)" + textwrap.dedent(ORPHAN) + READY
    text += "\ntime.sleep(600)"
    begun = time.monotonic()
    ended = program(text, send(signal.SIGINT, signal.SIGINT))
    assert ended.exit_code == 130
    assert time.monotonic() - begun < HANG_S
    assert goes(program.orphan())


def test_a_rank_that_is_just_being_started_is_not_left_behind(monkeypatch):
    """Between fork and exec nothing says whose it is; one look without anybody is not enough."""
    folder, wait = "/none/of/ours", time.sleep
    shell = subprocess.Popen(["sh"], stdin=subprocess.PIPE)

    def become_ours(seconds):
        if shell.stdin.closed:
            wait(seconds)
            return
        shell.stdin.write(f"exec env {SUPERVISOR_VARIABLE}={folder} sleep 600\n".encode())
        shell.stdin.close()
        while processes.environment(shell.pid).get(SUPERVISOR_VARIABLE) != folder:
            wait(0.001)

    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(processes.time, "sleep", become_ours)
    try:
        processes.kill_all(gone, folder)
        monkeypatch.undo()
        assert shell.wait(HANG_S) == -signal.SIGKILL
    finally:
        shell.kill()
        shell.wait()


def test_ranks_of_a_launcher_that_died_are_not_left_behind(program):
    """They are nobody's children any more, and in sessions of their own."""
    assert program(textwrap.dedent(ORPHAN) + "os.kill(os.getpid(), 9)").exit_code == 137
    assert goes(program.orphan())


def test_what_a_finished_script_started_on_purpose_may_stay(program):
    """An uploader in the background is not ours to kill when all ended in order."""
    try:
        assert program(textwrap.dedent(ORPHAN)).exit_code == 0
        assert lives(program.orphan())
    finally:
        os.kill(program.orphan(), signal.SIGKILL)


TELL = """
    with open(os.environ["TRAINCKPT_SUPERVISOR"] + "/rank0.json", "w") as told:
        json.dump({"rank": 0, "pid": 1, "host": "h", "run": os.environ["RUN"], "attempt": 1}, told)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("code", "returned"), [(1, 65), (0, 0)])
def test_the_code_of_a_refused_resume_is_returned(program, code, returned):
    """torchrun would say 1. A script that did without the Checkpointer and finished, finished."""
    text = f"""
        with open(os.environ["TRAINCKPT_SUPERVISOR"] + "/rank0.json", "w") as told:
            json.dump({{"rank": 0, "pid": 1, "host": "h", "run": "", "how": "refused",
                        "exit_code": 65}}, told)
        sys.exit({code})
    """
    ended = program(text)
    assert (ended.exit_code, ended.record) == (returned, None)


def test_a_refused_resume_tells_its_supervisor(tmp_path, monkeypatch):
    """From inside the Checkpointer, before there is a record of the attempt."""
    monkeypatch.setenv("TRAINCKPT_SUPERVISOR", str(tmp_path))
    with pytest.raises(NothingToResume):
        Checkpointer(tmp_path / "run", resume="required").resume()
    told = read_rank_statuses(tmp_path)[0]
    assert (told.how, told.exit_code, told.attempt) == ("refused", 66, None)


def test_a_rank_that_comes_back_in_another_namespace_of_numbers_says_so(tmp_path, monkeypatch):
    """Its memory, out of a dump, knows the one it was dumped in; nobody would find it there."""
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(tmp_path))
    status_writer = RankStatusWriter("run")
    status_writer._status = replace(status_writer._status, namespace="pid:[1]")
    status_writer.update(asked=False)
    assert read_rank_statuses(tmp_path)[0].namespace == namespace_of("self")


@pytest.fixture
def tier(tmp_path):
    """A run with one attempt."""
    tier = open_directory(str(tmp_path / "run"))
    attempt_history.found_run(tier)
    attempt_history.claim(tier, lambda n: AttemptRecord(n, facts={"started": time.time() - 5}))
    return tier


@pytest.mark.parametrize(
    ("parent", "commit", "snapshot"),
    [
        ("undecided", None, None),
        ("s1~1.1", None, "s1~1.1"),
        ("s1~1.1", "s4~2.3", "s4~2.3"),
    ],
)
def test_an_attempt_that_died_without_a_word_is_recorded_as_killed(
    program, tier, parent, commit, snapshot
):
    """With the snapshot that stands: its newest, else the one it began from."""
    before = attempt_history.read_attempts(tier)[1]
    attempt_history.replace(tier, before.with_(parent=parent, newest_commit=commit))
    ended = program(TELL, RUN=tier.url)
    assert ended.exit_code == 137
    written = attempt_history.read_attempts(tier)[1]
    assert written == ended.record
    assert written.state == "ended"
    outcome = written.outcome
    assert (outcome["outcome"], outcome["snapshot"], outcome["exit_code"]) == (
        "killed",
        snapshot,
        137,
    )
    assert outcome["tiers"] == (["local"] if snapshot else [])
    assert 5 <= outcome["seconds"] < 5 + HANG_S
    assert {"kind", "exactness", "lost_micro_batches"} <= outcome.keys()


@pytest.mark.parametrize(
    ("outcome", "recorded", "code"),
    [("stopped", 75, 75), ("finished", 0, 137), ("failed", 3, 3), ("failed", 0, 137)],
)
def test_the_record_decides_the_code_because_launchers_swallow_it(
    program, tier, outcome, recorded, code
):
    """The launcher itself says 137 here; a failure is never turned into a success."""
    before = attempt_history.read_attempts(tier)[1]
    told = {"outcome": outcome, "exit_code": recorded}
    attempt_history.replace(tier, before.with_(outcome=told))
    ended = program(TELL, RUN=tier.url)
    assert ended.exit_code == code
    assert json.loads((tier.root / "attempts" / "1.json").read_text())["outcome"] == told


def test_a_run_that_was_told_to_stop_by_a_notice_file_is_not_started_again(program, tier):
    """It failed on its way to the stop; `pause` would find it running again."""
    text = TELL.replace('"attempt": 1}', '"attempt": 1, "asked": True}')
    assert text != TELL
    assert program(text, RUN=tier.url, max_restarts=3).restarts == 0
    assert program(TELL, RUN=tier.url, max_restarts=1).restarts == 1


@pytest.mark.parametrize("said", ["failed", "killed", "stopped"])
def test_what_another_rank_s_failure_did_to_rank_0_is_corrected_in_the_record(said):
    """A broken connection, a stop that nobody answered, torchrun's SIGTERM taken for a notice."""
    code = {"failed": 1, "killed": 71, "stopped": 75}[said]
    first = Outcome(3, "failed", "rank 1 ended with 3")
    assert supervisor_record._is_consequence({"outcome": said, "exit_code": code}, first)
    assert not supervisor_record._is_consequence({"outcome": "failed", "exit_code": 4}, first)


def named(tmp_path):
    """The run of a command that has none."""
    return partial(NamedRun, str(tmp_path / "run"), ["python", "train.py", "--key=x"], None, 1)


def test_a_command_with_a_place_and_no_checkpointer_is_recorded_while_it_runs(
    program, tmp_path, monkeypatch
):
    """After a while without an import of trainckpt, so that others can find it."""
    monkeypatch.setattr(supervisor_record, "CLAIM_AFTER_S", 0.0)
    text = """
        place = os.environ["TRAINCKPT_RUN"] + "/attempts/1.json"
        while not os.path.exists(place):
            time.sleep(0.01)
        open(sys.argv[2], "w").write(open(place).read())
    """
    ended = program(text, name=named(tmp_path))
    assert ended.exit_code == 0
    seen = json.loads((tmp_path / "orphan").read_text())
    assert (seen["state"], seen["outcome"], seen["parent"]) == ("running", None, "undecided")
    assert seen["argv"] == ["python", "train.py", "--key=<redacted>"]
    assert ended.record.attempt == 1
    assert ended.record.outcome["outcome"] == "finished"
    assert ended.record.outcome["snapshot"] is None


@pytest.mark.parametrize(
    ("end", "outcome", "code"),
    [("sys.exit(5)", "failed", 5), ("os.kill(os.getpid(), 9)", "killed", 137)],
)
def test_how_such_a_command_ended_is_recorded_at_its_end(program, tmp_path, end, outcome, code):
    """However short it was."""
    ended = program(end, name=named(tmp_path))
    assert (ended.record.outcome["outcome"], ended.record.outcome["exit_code"]) == (outcome, code)


@pytest.mark.parametrize(
    "end",
    [
        (
            "from trainckpt.attempt.status_files import RankStatusWriter\n"
            "RankStatusWriter('x').update(state='left', how='refused', exit_code=66); sys.exit(66)"
        ),
        "import trainckpt, a_module_that_is_not_there",
    ],
)
def test_what_fails_before_its_checkpointer_founds_no_run(program, tmp_path, end):
    """A restart with a mistyped place would go on from it, at step 0, and nobody would notice."""
    ended = program(end, name=named(tmp_path))
    assert ended.exit_code in (1, 66)
    assert ended.record is None
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_rank_that_claims_its_own_attempt_is_not_doubled(program, tier, tmp_path):
    """The name is there for commands that need one."""
    program(TELL, name=named(tmp_path), RUN=tier.url)
    assert len(attempt_history.read_attempts(tier)) == 1


def test_a_place_that_cannot_be_written_does_not_change_how_a_command_ended(program, tmp_path):
    """It is said, and the code is the command's."""
    (tmp_path / "run").write_text("no folder")
    said = []
    assert program("sys.exit(5)", name=named(tmp_path), say=said.append).exit_code == 5
    assert [line[:6] for line in said] == ["--run:"]


def test_a_signal_before_the_start_starts_nothing(program, tmp_path):
    """While options were read, say. The command is known to use trainckpt."""
    with Inbox() as inbox:
        os.kill(os.getpid(), signal.SIGTERM)
        ended = program("open(sys.argv[2], 'w')", inbox=inbox, ours=True)
    assert (ended.exit_code, ended.record) == (75, None)
    assert not (tmp_path / "orphan").exists()
