"""`trainckpt pause`: a live run stops at a checkpoint; what else may come of it, and its code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time

import pytest

from tests.cli import pausing
from tests.ranks.processes import context, run_ranks
from trainckpt.attempt import heartbeat
from trainckpt.attempt.heartbeat import Heartbeat
from trainckpt.cli import pause
from trainckpt.cli.main import main
from trainckpt.dumping.dump_choice import DUMP
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.launcher import dumper
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

OUTCOME = {
    "outcome",
    "snapshot",
    "kind",
    "exactness",
    "lost_micro_batches",
    "tiers",
    "seconds",
    "exit_code",
}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("TRAINCKPT_PROVE", "TRAINCKPT_SUPERVISOR"):
        monkeypatch.delenv(name, raising=False)


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextlib.contextmanager
def living(run, attempt=1, **how):
    """A training process that goes on until it is stopped; killed when the test is over."""
    process = context.Process(target=pausing.train, args=(0, str(run)), kwargs=how, daemon=True)
    process.start()
    try:
        wait_for(lambda: has_begun(run, attempt) or process.exitcode is not None)
        assert process.exitcode is None
        yield process
    finally:
        process.kill()
        process.join()


def has_begun(run, attempt=1):
    """Alive, and past its first boundary."""
    record = attempt_history.read_attempts(LocalTier(run)).get(attempt)
    return (
        bool(record)
        and record.state == "running"
        and heartbeat.attempt_is_alive(LocalTier(run), attempt)
    )


def notices(run):
    return sorted(path.name for path in run.glob("notices/*"))


# ---- real runs


def test_a_live_run_is_paused_says_what_it_saved_and_goes_on_later(tmp_path, capsys):
    run = tmp_path / "run"
    with living(run) as process:
        assert main(["pause", "--json", "--deadline", "60s", str(run)]) == 0
        process.join(60)
        assert process.exitcode == 75
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert told.keys() >= OUTCOME
    assert (told["outcome"], told["exit_code"], told["lost_micro_batches"]) == ("stopped", 75, 0)
    assert (told["run"], told["attempt"], told["reason"]) == (str(run), 1, "trainckpt pause")
    assert (run / "snapshots" / told["snapshot"] / "manifest.json").exists()
    assert "attempt 1" in shown.err
    assert notices(run) == []
    assert not heartbeat.path_of(LocalTier(run), 1).exists()

    step = int(told["snapshot"].split("~")[0].split("m")[0][1:])
    finish = context.Process(target=pausing.train, args=(0, str(run)), kwargs={"steps": step + 2})
    finish.start()
    finish.join(60)
    assert finish.exitcode == 0
    again = attempt_history.read_attempts(LocalTier(run))[2]
    assert (again.parent, again.outcome["outcome"]) == (told["snapshot"], "finished")
    assert again.outcome["exactness"] == "bitwise"


def test_two_ranks_are_paused_at_one_micro_batch_and_both_leave_with_75(tmp_path, capsys):
    run, codes = tmp_path / "run", []
    ranks = threading.Thread(
        target=lambda: codes.extend(run_ranks(pausing.train, 2, str(run))), daemon=True
    )
    ranks.start()
    wait_for(lambda: has_begun(run))
    assert main(["pause", str(run)]) == 0
    ranks.join(60)
    assert codes == [("exit", 75), ("exit", 75)]
    (snapshot,) = (run / "snapshots").iterdir()
    assert f"attempt 1 stopped: saved {snapshot.name} in {run} (local)" in capsys.readouterr().out


def test_a_run_that_reaches_no_boundary_in_time_is_71(tmp_path, capsys):
    """Whoever notices first, the run itself or the one who waits."""
    run = tmp_path / "run"
    with living(run, stuck_at=2):
        assert main(["pause", "--json", "--deadline", "2 s", str(run)]) == 71
    told = json.loads(capsys.readouterr().out)
    assert told["code"] == 71
    assert told["error"].startswith("attempt 1 ")


def test_a_notice_that_nobody_answered_stands_and_never_stops_the_next_attempt(tmp_path, capsys):
    played = Played(tmp_path)
    assert main(["pause", "--json", "--deadline", "0.5s", str(tmp_path)]) == 71
    assert "attempt 1 has not stopped within 0.5 s" in json.loads(capsys.readouterr().out)["error"]
    (notice,) = notices(tmp_path)
    assert json.loads((tmp_path / "notices" / notice).read_text()) == {
        "reason": "trainckpt pause",
        "seconds_left": 0.5,
        "mode": None,
        "dump": False,
    }
    played.heart.stop()

    train = context.Process(target=pausing.train, args=(0, str(tmp_path)), kwargs={"steps": 120})
    train.start()  # longer than a second: its watcher has looked at the notices
    train.join(60)
    assert train.exitcode == 0
    assert attempt_history.read_attempts(played.tier)[2].outcome["outcome"] == "finished"
    assert notices(tmp_path) == [notice]


def test_a_dump_that_nobody_ends_is_waited_for_until_the_deadline(tmp_path, capsys, monkeypatch):
    """The supervisor chose it, and died, or its host."""
    monkeypatch.setattr(pause, "SAY_EVERY_S", 0.2)
    played = Played(tmp_path, facts={"launch": {"by": "supervisor"}})
    dies = threading.Thread(target=chooses_a_dump, args=(played.tier,))
    dies.start()
    assert main(["pause", "--deadline", "2s", str(tmp_path)]) == 71
    dies.join()
    said = capsys.readouterr().err
    assert "attempt 1 was not dumped in the time that was left" in said
    assert "waiting for the dump, " in said
    played.heart.stop()
    assert notices(tmp_path) == []


def chooses_a_dump(tier):
    wait_for(lambda: dumper.find(tier, 1, set()))
    dumper.answer(tier, dumper.find(tier, 1, set()), dumper.DumpAnswer(DUMP, "it fits"))


def test_a_run_that_is_killed_meanwhile_is_66_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(heartbeat, "ALIVE_S", 7.0)
    monkeypatch.setattr(pause, "SILENT_FOR_S", 0.1)
    run = tmp_path / "run"
    with living(run, stuck_at=2) as process:
        threading.Timer(0.5, process.kill).start()
        assert main(["pause", str(run)]) == 66
    assert "attempt 1 died before it could stop, for an unknown reason" in capsys.readouterr().err


def test_a_run_whose_heartbeat_is_gone_for_a_moment_is_waited_for(tmp_path, capsys, monkeypatch):
    """Rank 0 rests, and others do not yet: the heartbeat of its dump is still to come."""
    monkeypatch.setattr(pause, "LISTEN_EVERY_S", 0.05)
    is_alive, answers = heartbeat.attempt_is_alive, []

    def seen(tier, attempt):
        answers.append(is_alive(tier, attempt))
        return answers[-1]

    monkeypatch.setattr(heartbeat, "attempt_is_alive", seen)
    played = Played(tmp_path)

    def rests():
        wait_for(lambda: notices(tmp_path))
        played.heart.stop()
        wait_for(lambda: answers and not answers[-1])
        played.heart = Heartbeat(played.tier, played.record.attempt)
        played.heart.start()
        wait_for(lambda: answers[-1])
        played.ends("stopped")

    thread = threading.Thread(target=rests)
    thread.start()
    assert main(["pause", str(tmp_path)]) == 0
    thread.join()
    assert "attempt 1 stopped: saved s4~1.1 in " in capsys.readouterr().out


# ---- attempts that a test plays


class Played:
    """An attempt whose record a test writes, with a heartbeat."""

    def __init__(self, run, beats=True, **record):
        self.tier = LocalTier(run)
        attempt_history.found_run(self.tier)
        self.record = attempt_history.claim(self.tier, lambda n: AttemptRecord(n, None, **record))
        self.heart = Heartbeat(self.tier, self.record.attempt)
        if beats:
            self.heart.start()
            wait_for(heartbeat.path_of(self.tier, self.record.attempt).exists)

    def ends(self, how, **facts):
        """As soon as a notice is there."""

        def end():
            wait_for(lambda: notices(self.tier.root))
            outcome = {
                "outcome": how,
                "snapshot": "s4~1.1",
                "lost_micro_batches": 0,
                "tiers": ["local"],
                "exit_code": 75,
                "reason": "its end",
                **facts,
            }
            attempt_history.replace(self.tier, self.record.with_(state="ended", outcome=outcome))
            self.heart.stop()

        threading.Thread(target=end, daemon=True).start()


@pytest.mark.parametrize(
    ("how", "facts", "code", "words"),
    [
        ("stopped", {}, 0, "attempt 1 stopped: saved s4~1.1 in "),
        ("finished", {"exit_code": 0}, 0, "attempt 1 finished before it could stop: s4~1.1 in "),
        ("failed", {"exit_code": 1}, 66, "attempt 1 failed before it could stop (its end)"),
        ("killed", {"snapshot": None}, 66, "killed before it could stop (its end); it saved"),
        ("stopped", {"lost_micro_batches": 3}, 74, "its last save failed: s4~1.1 in "),
        (
            "killed",
            {"exit_code": 71},
            71,
            "its ranks were too late: its end; newest snapshot: s4~1.1",
        ),
        ("stopped", {"snapshot": None, "exit_code": 65}, 65, "stopped, but nothing could be saved"),
    ],
)
def test_however_the_attempt_ends_the_code_and_a_sentence_say_so(
    tmp_path, capsys, how, facts, code, words
):
    Played(tmp_path).ends(how, **facts)
    assert main(["pause", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert words in (shown.err if code else shown.out)
    assert (shown.out == "") == bool(code)

    Played(tmp_path).ends(how, **facts)
    assert main(["pause", "--json", str(tmp_path)]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["outcome"] == how
    assert told["exit_code"] == facts.get("exit_code", 75)
    assert told.get("code", 0) == code


def test_the_newest_live_attempt_is_the_one_that_is_told(tmp_path):
    older = Played(tmp_path)
    newest = Played(tmp_path)
    newest.ends("stopped")
    assert main(["pause", str(tmp_path)]) == 0
    assert attempt_history.read_attempts(older.tier)[1].outcome is None
    older.ends("stopped")
    assert main(["pause", str(tmp_path)]) == 0
    assert attempt_history.read_attempts(older.tier)[1].outcome is not None


def test_progress_of_a_long_wait_goes_to_stderr(tmp_path, capsys, monkeypatch):
    """The run ends once it has been said."""
    monkeypatch.setattr(pause, "SAY_EVERY_S", 0.1)
    played, say = Played(tmp_path, newest_commit="s4~1.1"), pause._say

    def said(words):
        say(words)
        if words.startswith("waiting, "):
            played.ends("stopped")

    monkeypatch.setattr(pause, "_say", said)
    assert main(["pause", "--json", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["outcome"] == "stopped"
    assert re.search(r"pause: waiting, \d+ s; newest snapshot: s4~1\.1\n", shown.err)


def test_an_interrupt_ends_the_wait_and_not_the_notice(tmp_path, capsys, monkeypatch):
    """The interrupt comes between two looks at the run, never while a file is being opened."""
    monkeypatch.setattr(pause, "SAY_EVERY_S", 0.2)
    played = Played(tmp_path)

    def interrupt_the_wait(text):
        if text.startswith("waiting, "):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(pause, "_say", interrupt_the_wait)
    assert main(["pause", "--json", str(tmp_path)]) == 130
    assert "the notice stands" in json.loads(capsys.readouterr().out)["error"]
    assert len(notices(tmp_path)) == 1
    played.heart.stop()


# ---- nobody there


def test_what_was_found_in_place_of_a_live_run_is_named(tmp_path, capsys):
    """An ended attempt, one that went silent, one that never gave a sign."""
    Played(tmp_path, beats=False, outcome={"outcome": "finished"})
    silent = Played(tmp_path)
    silent.heart.stop()
    path = heartbeat.path_of(silent.tier, 2)
    path.touch()
    os.utime(path, (time.time() - 90, time.time() - 90))
    Played(tmp_path, beats=False)
    assert main(["pause", "--json", str(tmp_path)]) == 66
    told = json.loads(capsys.readouterr().out)
    assert told["error"].startswith(f"no live run at {tmp_path}: attempt 3 left no outcome, and ")
    assert "attempt 2 left no outcome, and its last sign of life is " in told["error"]
    assert told["error"].endswith("attempt 1 finished")
    assert "--attempts" in told["hint"]
    assert notices(tmp_path) == []


def test_a_place_without_a_run_is_66_and_is_not_made_by_looking(tmp_path, capsys):
    assert main(["pause", "--json", str(tmp_path / "none")]) == 66
    assert "there is no run at" in json.loads(capsys.readouterr().out)["error"]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--deadline", "30"], "'30' is no duration; use \"30s\""),
        (["--deadline", "soon"], "'soon' is no duration"),
    ],
)
def test_what_cannot_be_asked_is_78_and_nobody_is_told(tmp_path, capsys, arguments, why):
    Played(tmp_path, beats=False)
    assert main(["pause", "--json", *arguments, str(tmp_path)]) == 78
    assert why in json.loads(capsys.readouterr().out)["error"]
    assert notices(tmp_path) == []


@pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0, reason="gives a run away, so needs root"
)
def test_the_folder_that_another_users_pause_has_left_is_made_anew(open_path):
    played = Played(open_path / "run")
    (open_path / "run" / "notices").mkdir(mode=0o755)
    for path in (open_path / "run", *(open_path / "run").rglob("*")):
        if path.name != "notices":
            os.chown(path, 65534, 65534)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            code = main(["pause", "--deadline", "0.1 s", str(open_path / "run")])
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    played.heart.stop()
    assert os.waitstatus_to_exitcode(status) == 71
    (notice,) = (open_path / "run" / "notices").iterdir()
    assert notice.stat().st_uid == notice.parent.stat().st_uid == 65534


@pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0, reason="gives a run away, so needs root"
)
def test_a_notice_by_root_can_be_read_by_the_user_of_the_run(tmp_path):
    played = Played(tmp_path)
    os.chown(heartbeat.path_of(played.tier, 1), 65534, 65534)
    assert main(["pause", "--deadline", "0.1 s", str(tmp_path)]) == 71
    (notice,) = (tmp_path / "notices").iterdir()
    for path in (notice, notice.parent):
        assert path.stat().st_uid == 65534
        assert not path.stat().st_mode & 0o077
    played.heart.stop()
