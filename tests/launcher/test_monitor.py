"""What is done about ranks while they run: signals, deadlines, lost ranks. Without torch.

The ranks are small programs that tell what a Checkpointer would (`ranks`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.limits import HANG_S
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE, RankStatusWriter, read_rank_statuses
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.launcher import supervisor_signals
from trainckpt.launcher.supervise import supervise
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history

LAUNCHER = str(Path(__file__).with_name("ranks.py"))
CLAIM = "tell(rank, attempt=1, state='claimed')"
STAY = "time.sleep(120)"


@pytest.fixture
def launch(tmp_path):
    """Supervise ranks with these texts; `act` is called once the files in `when` are there."""

    def run(*texts: str, when=(), act=None, inside=(), **options):
        def watch(_):
            until = time.monotonic() + HANG_S
            while not all((tmp_path / name).exists() for name in when):
                assert time.monotonic() < until
                time.sleep(0.01)
            act()

        command = [*inside, sys.executable, LAUNCHER, str(tmp_path), *map(textwrap.dedent, texts)]
        return supervise(command, watch=watch if act is not None else None, **options)

    return run


@pytest.fixture
def tier(tmp_path):
    """The run of those ranks, with an attempt that has committed something."""
    tier = open_directory(str(tmp_path / "run"))
    attempt_history.found_run(tier)
    attempt_history.claim(
        tier,
        lambda n: AttemptRecord(
            n, parent=None, state="running", newest_commit="s4~1.2", facts={"started": time.time()}
        ),
    )
    return tier


def to_us(number: int):
    return lambda: os.kill(os.getpid(), number)


def pids(tmp_path: Path, ranks: int) -> list[int]:
    return [int((tmp_path / f"pid{rank}").read_text()) for rank in range(ranks)]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
    ],
)
def test_a_signal_reaches_every_rank_and_neither_launcher_nor_workers(launch, sent, arrives):
    """A worker in the rank's process group would die of it; so would the launcher."""
    text = f"""
        block()
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"],
                                  preexec_fn=lambda: signal.pthread_sigmask(
                                      signal.SIG_UNBLOCK, {{signal.SIGTERM, signal.SIGINT}}))
        {CLAIM}
        ready(f"up{{rank}}")
        heard(f"heard{{rank}}", {int(arrives)})
        wait_for("heard0"), wait_for("heard1")
        code = 75 if worker.poll() is None else 9
        worker.kill()
        tell(rank, attempt=1, state="left", how="stopped", exit_code=code)
        sys.exit(code)
    """
    ended = launch(text, text, when=["up0", "up1"], act=to_us(sent))
    assert ended.exit_code == 75


def test_ranks_that_hear_no_signal_get_a_notice_in_place_of_one_that_would_kill_them(launch, tier):
    """Their Checkpointer was made on a thread; also where the signal comes before their attempt."""
    text = """
        tell(rank, deaf=True); ready("up"); wait_for("claim")
        tell(rank, attempt=1, state="claimed", deaf=True, grace_s=40.0)
        notices = FOLDER / "run" / "notices"
        while not (found := list(notices.glob("1-*.json"))):
            time.sleep(0.01)
        notice = json.loads(found[0].read_text())
        code = 75 if notice["reason"] == "SIGTERM" and 0 < notice["seconds_left"] < 40 else 9
        tell(rank, attempt=1, state="left", how="stopped", exit_code=code, deaf=True)
        sys.exit(code)
    """

    def act():
        os.kill(os.getpid(), signal.SIGTERM)
        (tier.root.parent / "claim").touch()

    assert launch(text, when=["up"], act=act).exit_code == 75


def test_a_checkpointer_that_is_made_on_a_thread_says_that_it_hears_no_signals(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(tmp_path))
    thread = threading.Thread(target=lambda: RankStatusWriter("run").update(rank=1))
    thread.start()
    thread.join()
    RankStatusWriter("run").update(rank=0)
    assert [told.deaf for _, told in sorted(read_rank_statuses(tmp_path).items())] == [False, True]


IGNORES = ["sh", "-c", 'trap "" TERM; exec "$@"', "sh"]


def test_the_grace_holds_also_for_the_copy_that_ranks_make_once_they_are_done(launch, tier):
    """A slower tier that hangs kept them until somebody sent SIGKILL; and what stands is said."""
    far = {"started": time.time(), "tiers": [{"name": "far", "url": "/far"}]}
    done = {"outcome": "finished", "snapshot": "s4~1.2", "reason": "final", "exit_code": 0}
    record = attempt_history.read_attempts(tier)[1]
    attempt_history.replace(tier, record.with_(state="ended", facts=far, outcome=done))
    text = f"""
        tell(rank, attempt=1, state="left", how="finished", exit_code=0, grace_s=1.0)
        ready("up"); {STAY}
    """
    said = []
    ended = launch(text, when=["up"], act=to_us(15), inside=IGNORES, say=said.append)
    assert ended.exit_code == 71
    assert "after SIGTERM the run had not left (ranks still there: 0)" in ended.why
    assert ended.record.outcome["outcome"] == "finished"
    assert said == [
        "attempt 1 finished by final: no time to copy s4~1.2 to far",
        "not all files were copied; the next attempt or `trainckpt flush` copies the rest",
    ]


def test_a_signal_that_a_script_between_two_runs_has_answered_ends_neither(launch, tmp_path):
    """It goes on to its next Checkpointer, whose grace has not begun."""
    text = """
        tell(rank, attempt=1, state="left", how="finished", exit_code=0, grace_s=1.0)
        ready("up"); wait_for("passed"); tell(rank, attempt=1, state="claimed", grace_s=1.0)
        time.sleep(2.0); tell(rank, attempt=1, state="left", how="finished", exit_code=0)
    """

    answers = f'trap ": >{tmp_path}/passed" TERM; "$@" & wait $!; wait $!'
    inside = ["sh", "-c", answers, "sh"]
    assert launch(text, when=["up"], act=to_us(15), inside=inside).exit_code == 0


OWN_NUMBERS = ["unshare", "--pid", "--fork"]


def why_no_own_numbers() -> str:
    if shutil.which("unshare") is None:
        return "needs unshare"
    can = subprocess.run([*OWN_NUMBERS, "true"], capture_output=True, check=False).returncode == 0
    return "" if can else "no namespace of process numbers can be made"


@pytest.mark.skipif(bool(why_no_own_numbers()), reason=why_no_own_numbers())
def test_ranks_of_a_container_are_found_though_they_tell_other_numbers(launch, tmp_path):
    """Nobody else who has such a number here gets the signal, or is ended with them."""
    text = f"""
        block()
        assert os.getpid() < 20
        {CLAIM}
        ready(f"up{{rank}}")
        heard(f"heard{{rank}}")
        tell(rank, attempt=1, state="left", how="stopped", exit_code=75)
        sys.exit(75)
    """
    up = ["up0", "up1"]
    ended = launch(text, text, when=up, act=to_us(signal.SIGTERM), inside=OWN_NUMBERS)
    assert ended.exit_code == 75
    assert (tmp_path / "heard0").exists()
    assert (tmp_path / "heard1").exists()


def test_a_signal_before_any_rank_listens_ends_start_up_with_75(launch, tmp_path, tier):
    """Nothing was trained: the newest attempt's record says nothing of it."""
    before = (tier.root / "attempts" / "1.json").read_bytes()
    text = f"""
        (FOLDER / f"pid{{rank}}").write_text(str(os.getpid()))
        ready(f"up{{rank}}")
        {STAY}
    """
    ended = launch(text, text, when=["up0", "up1"], act=to_us(signal.SIGTERM), max_restarts=3)
    assert (ended.exit_code, ended.record, ended.restarts) == (75, None, 0)
    assert not any(map(lives, pids(tmp_path, 2)))
    assert (tier.root / "attempts" / "1.json").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_rank_that_alone_gets_a_notice_in_start_up_means_75_too(launch, number):
    """It dies of it, since nobody listens yet; torchrun would call that a failure."""
    dies = f"signal.signal({int(number)}, signal.SIG_DFL); os.kill(os.getpid(), {int(number)})"
    ended = launch("sys.exit(0)", dies, max_restarts=3)
    assert (ended.exit_code, ended.restarts) == (75, 0)
    assert f"got {number.name} before it listened" in ended.why


def test_ranks_that_miss_the_deadline_are_killed_and_the_newest_commit_stands(launch, tmp_path, tier):  # fmt: skip  # noqa: E501
    """A call that holds the interpreter's lock stops every thread of a rank: only we are left."""
    text = """
        import ctypes
        (FOLDER / f"pid{rank}").write_text(str(os.getpid()))
        block()
        tell(rank, attempt=1, state="claimed", grace_s=3.0)
        ready(f"up{rank}")
        ctypes.PyDLL(None).sleep(1000)
    """
    begun = []

    def act():
        begun.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    ended = launch(text, text, when=["up0", "up1"], act=act, max_restarts=3)
    assert ended.exit_code == 71
    assert ended.restarts == 0
    assert 2.6 <= time.monotonic() - begun[0] < HANG_S
    assert not any(map(lives, pids(tmp_path, 2)))
    outcome = attempt_history.read_attempts(tier)[1].outcome
    assert (outcome["outcome"], outcome["exit_code"], outcome["snapshot"]) == (
        "killed",
        71,
        "s4~1.2",
    )
    assert outcome["reason"].startswith("deadline: 2.")
    assert "SIGTERM" in outcome["reason"]


def test_ranks_that_stopped_and_linger_past_the_deadline_have_stopped(launch):
    """What counts is what they said; they are ended all the same."""
    text = f"""
        block()
        tell(rank, attempt=1, state="claimed", grace_s=2.0)
        ready("up")
        heard("heard")
        tell(rank, attempt=1, state="left", grace_s=2.0, how="stopped", exit_code=75)
        {STAY}
    """
    assert launch(text, when=["up"], act=to_us(signal.SIGTERM)).exit_code == 75


@pytest.mark.parametrize(
    ("last", "code", "outcome"),
    [
        ("os.kill(os.getpid(), 9)", 137, "killed"),
        ("sys.exit(5)", 5, "failed"),
        (
            "tell(rank, attempt=1, state='left', how='failed', exit_code=3); time.sleep(120)",
            3,
            "failed",
        ),
    ],
)
def test_when_one_rank_is_lost_the_others_do_not_wait_for_long(
    launch, tmp_path, tier, monkeypatch, last, code, outcome
):
    """Neither for an agreement nor for torchrun; its end is the run's."""
    monkeypatch.setattr(supervisor_signals, "OTHERS_S", 1.0)
    stays = f"""
        (FOLDER / f"pid{{rank}}").write_text(str(os.getpid()))
        {CLAIM}
        ready(f"up{{rank}}")
        wait_for("up0"), wait_for("up1")
    """
    ended = launch(textwrap.dedent(stays) + STAY, textwrap.dedent(stays) + last)
    assert ended.exit_code == code
    assert "rank 1" in ended.why
    assert not any(map(lives, pids(tmp_path, 2)))
    written = attempt_history.read_attempts(tier)[1]
    assert (written.outcome["outcome"], written.outcome["exit_code"]) == (outcome, code)
    assert written.outcome["snapshot"] == "s4~1.2"
    assert written.outcome["reason"] == ended.why


@pytest.mark.parametrize("how", ["finished", "stopped"])
def test_a_rank_that_left_in_order_may_take_its_time(launch, monkeypatch, how):
    """Rank 1 has gone long ago; rank 0 still writes its results."""
    monkeypatch.setattr(supervisor_signals, "OTHERS_S", 0.2)
    code = 75 if how == "stopped" else 0
    leave = f"tell(rank, attempt=1, state='left', how='{how}', exit_code={code})\n"
    slow = leave + "wait_for('gone'); time.sleep(2); ready('written')\n"
    fast = leave + "ready('gone')\n"
    ended = launch(slow + f"sys.exit({code})", fast + f"sys.exit({code})")
    assert ended.exit_code == code


def test_a_rank_that_ends_well_without_closing_is_not_lost(launch, monkeypatch):
    """Its loop was over, and it has no `with` block."""
    monkeypatch.setattr(supervisor_signals, "OTHERS_S", 0.2)
    assert launch(f"{CLAIM}; time.sleep(2)", CLAIM).exit_code == 0


def test_a_second_interrupt_ends_ranks_that_take_their_time(launch, tmp_path, tier):
    """At once, and the record says by whom."""
    text = f"""
        (FOLDER / f"pid{{rank}}").write_text(str(os.getpid()))
        block()
        {CLAIM}
        ready("up")
        heard("first", signal.SIGINT)
        {STAY}
    """

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        while not (tmp_path / "first").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    ended = launch(text, when=["up"], act=twice, max_restarts=3)
    assert (ended.exit_code, ended.restarts) == (130, 0)
    assert not any(map(lives, pids(tmp_path, 1)))
    assert attempt_history.read_attempts(tier)[1].outcome["exit_code"] == 130


@pytest.mark.parametrize(("how", "code"), [("stopped", 75), ("failed", 1)])
def test_a_failure_that_made_the_others_stop_or_fail_is_recorded_as_itself(launch, tier, how, code):
    """torchrun sends SIGTERM to the others, a notice to them; or their connections break."""
    fails = f"{CLAIM}; tell(rank, attempt=1, state='left', how='failed', exit_code=3); sys.exit(3)"
    stops = f"""
        wait_for("failed")
        record = {{"outcome": "{how}", "exit_code": {code}, "snapshot": "s4~1.2"}}
        from trainckpt.run_directory.run_url import open_directory
        from trainckpt.snapshot import attempt_history as attempts
        tier = open_directory(str(FOLDER / "run"))
        attempts.replace(tier, attempts.read_attempts(tier)[1].with_(outcome=record, state="ended"))
        tell(rank, attempt=1, state="left", how="{how}", exit_code={code})
        sys.exit({code})
    """
    ended = launch(stops, fails.replace("sys.exit(3)", "ready('failed'); sys.exit(3)"))
    assert ended.exit_code == 3
    outcome = attempt_history.read_attempts(tier)[1].outcome
    assert (outcome["outcome"], outcome["exit_code"], outcome["snapshot"]) == (
        "failed",
        3,
        "s4~1.2",
    )


def test_what_failed_is_started_again_and_said_so(launch, tmp_path, tier):
    """In place, with evidence of the restart for `resume`, as often as allowed."""
    text = f"""
        {CLAIM}
        with (FOLDER / "starts").open("a") as file:
            file.write(os.environ.get("TRAINCKPT_RESTART", "-")
                       + os.environ.get("TRAINCKPT_RESUME_AT", "-"))
        if os.environ.get("TRAINCKPT_RESTART") == "2":
            tell(rank, attempt=1, state="left", how="finished", exit_code=0)
            sys.exit(0)
        sys.exit(3)
    """
    said = []
    at = {"TRAINCKPT_RESUME_AT": "A"}
    ended = launch(text, max_restarts=3, say=said.append, environment=at)
    assert (ended.exit_code, ended.restarts) == (0, 2)
    assert (tmp_path / "starts").read_text() == "-A1-2-"
    assert said == [f"rank 0 ended with 3; restart {n} of 3" for n in (1, 2)]


def test_restarts_have_an_end_and_need_no_attempt(launch, tmp_path):
    """A command without a Checkpointer is started again too, without evidence of a run."""
    text = """
        with (FOLDER / "starts").open("a") as file:
            file.write(os.environ.get("TRAINCKPT_RESTART", "-"))
        sys.exit(3)
    """
    ended = launch(text, max_restarts=2)
    assert (ended.exit_code, ended.restarts) == (3, 2)
    assert (tmp_path / "starts").read_text() == "---"


def test_an_error_of_the_watcher_beside_it_is_not_lost(launch):
    """And nothing is left running."""

    def fails():
        raise RuntimeError("the test's own")

    with pytest.raises(RuntimeError, match="the test's own"):
        launch(f"ready('up'); {STAY}", when=["up"], act=fails)
