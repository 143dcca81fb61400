"""What is done about a signal, a deadline, a lost rank, a failure: pure."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace

import pytest

from trainckpt.attempt.status_files import CLAIMED, LEFT, LISTENING, RETURNED, RankStatus
from trainckpt.launcher import supervisor_signals
from trainckpt.launcher.monitor import LaunchMonitor
from trainckpt.launcher.outcome import Outcome
from trainckpt.launcher.processes import handles
from trainckpt.launcher.supervisor_signals import (
    Inbox,
    RankProcess,
    SignalAction,
    about_signal,
    deadline_after_s,
)


def rank(number: int, how: str | None = None, *, alive=True, code=None, state=None, grace=None):
    state = state or (LEFT if how else CLAIMED)
    status = RankStatus(number, 100 + number, "h", "/run", 1, state, grace, how)
    return RankProcess(status, 0.0, alive, code)


def order(number: int, *ranks: RankProcess, ours=True, interrupts=0):
    return about_signal(number, ranks, ours=ours, interrupts=interrupts)


@pytest.mark.parametrize(
    ("sent", "delivered"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
    ],
)
def test_signals_go_to_the_ranks_that_listen(sent, delivered):
    """As one that every rank hears; not to those that are leaving or gone."""
    ranks = [rank(0, state=LISTENING), rank(1), rank(2, "stopped"), rank(3, alive=False)]
    found = order(sent, *ranks)
    assert (found.what, found.pids, found.number) == ("to ranks", (100, 101), delivered)


@pytest.mark.parametrize(
    ("ranks", "ours", "what"),
    [
        ([], True, "end"),
        ([], False, "to script"),
        ([rank(0, "stopped")], True, "nothing"),
        ([rank(0, "stopped"), rank(1, "failed")], True, "nothing"),
        ([rank(0, alive=False)], True, "nothing"),
        ([rank(0, "stopped", state=RETURNED)], True, "to script"),
        ([rank(0, "stopped", state=RETURNED), rank(1, "stopped")], True, "nothing"),
        ([rank(0, "finished")], True, "to script"),
        ([rank(0, "failed")], True, "to script"),
    ],
)
def test_where_nobody_listens_it_depends_on_how_far_the_script_is(ranks, ours, what):
    """Starting: end it. Leaving: let it. Without a Checkpointer, or done with it: the script's."""
    assert order(signal.SIGTERM, *ranks, ours=ours).what == what


def test_a_torchrun_that_starts_ranks_again_is_told_in_their_place():
    """Between two starts too, when none of them is there."""
    for ranks in ([rank(0), rank(1)], [rank(0, alive=False)], [rank(0, "stopped")]):
        found = about_signal(signal.SIGUSR1, ranks, ours=True, interrupts=0, agent=7)
        assert found == SignalAction("to ranks", (7,), signal.SIGTERM)
    assert about_signal(signal.SIGTERM, [], ours=True, interrupts=0, agent=7).what == "end"
    assert about_signal(signal.SIGINT, [rank(0)], ours=True, interrupts=2, agent=7).what == "kill"


def test_a_second_interrupt_kills_whoever_listens():
    assert order(signal.SIGINT, rank(0), interrupts=2).what == "kill"


@pytest.mark.parametrize(
    ("graces", "after"),
    [([None, None], None), ([3.0, None], 2.7), ([100.0, 60.0], 58.0), ([10.0], 9.0)],
)
def test_the_deadline_leaves_time_to_end_the_ranks(graces, after):
    """Two seconds or a tenth, of the shortest grace."""
    found = deadline_after_s([rank(n, grace=grace) for n, grace in enumerate(graces)])
    assert found == (None if after is None else pytest.approx(after))


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [
        ([rank(0), rank(1)], False),
        ([rank(0), rank(1, alive=False, code=-9)], True),
        ([rank(0), rank(1, alive=False)], True),
        ([rank(0), rank(1, alive=False, code=0)], False),
        ([rank(0), rank(1, "failed")], True),
        ([rank(0), rank(1, "failed", alive=False, code=3)], True),
        ([rank(0, "failed"), rank(1, "failed")], False),
        ([rank(0, "failed"), rank(1, "failed", alive=False, code=3)], True),
        ([rank(0), rank(1, "refused")], False),
        ([rank(0), rank(1, "refused", alive=False, code=1)], True),
        ([rank(0, "stopped"), rank(1, alive=False, code=-9)], False),
        ([rank(0), rank(1, "finished", alive=False, code=0)], False),
        ([rank(0), rank(1, "stopped", alive=False, code=75)], False),
        ([rank(0, alive=False, code=-9)], True),
    ],
)
def test_others_wait_in_vain_for_a_rank_that_died_or_failed(ranks, lost):
    """Not for one that left in order, and not those that have left in order themselves."""
    assert supervisor_signals.someone_is_lost(ranks) is lost


@pytest.mark.parametrize(
    ("verdict", "again"),
    [
        (Outcome(3, "failed", ""), True),
        (Outcome(137, "killed", ""), True),
        (Outcome(74, "failed", ""), True),
        (Outcome(71, "failed", ""), True),
        (Outcome(0, "finished", ""), False),
        (Outcome(75, "stopped", "", on_purpose=True), False),
        (Outcome(75, "notice", "", on_purpose=True), False),
        (Outcome(71, "killed", "deadline", on_purpose=True), False),
        (Outcome(130, "killed", "", on_purpose=True), False),
        *((Outcome(code, "failed", ""), False) for code in (65, 66, 69, 75, 78)),
        *((Outcome(code, "refused", ""), False) for code in (65, 66, 69, 78)),
    ],
)
def test_only_what_failed_by_itself_is_started_again(verdict, again):
    """As often as allowed, and never after a signal: whoever sent it decides."""
    assert supervisor_signals.starts_again(verdict, done=0, most=1, signalled=False) is again
    assert not supervisor_signals.starts_again(verdict, done=1, most=1, signalled=False)
    assert not supervisor_signals.starts_again(verdict, done=0, most=1, signalled=True)


def test_processes_may_be_dumped_instead_of_hearing_a_signal_unless_they_leave_already():
    status, term = rank(0).status, signal.SIGTERM
    deliver, to_script = (
        SignalAction(supervisor_signals.TO_RANKS, (100,), 15),
        SignalAction(supervisor_signals.TO_SCRIPT),
    )
    asked = RankProcess(replace(status, asked=True), 0.0, alive=True)
    assert supervisor_signals.may_be_dumped_instead(deliver, [rank(0)], term)
    assert supervisor_signals.may_be_dumped_instead(deliver, [rank(0)], signal.SIGINT)
    assert supervisor_signals.may_be_dumped_instead(to_script, [], term)
    assert not supervisor_signals.may_be_dumped_instead(to_script, [], signal.SIGINT)
    assert not supervisor_signals.may_be_dumped_instead(deliver, [rank(1), asked], term)
    assert not supervisor_signals.may_be_dumped_instead(to_script, [rank(0, "finished")], term)
    for what in (supervisor_signals.KILL, supervisor_signals.END, supervisor_signals.NOTHING):
        assert not supervisor_signals.may_be_dumped_instead(SignalAction(what), [], term)


def test_a_signal_does_not_say_that_the_host_is_lost_but_a_pod_is(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert supervisor_signals.host_returns()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert not supervisor_signals.host_returns()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert supervisor_signals.without_ranks_s({}) is None
    elsewhere = tmp_path / "launched"
    elsewhere.mkdir()
    (elsewhere / "trainckpt.toml").write_text('grace = "20 s"')
    recorded = {"env": {"TRAINCKPT_GRACE": "60 s"}, "cwd": str(elsewhere)}
    assert supervisor_signals.without_ranks_s({"cwd": str(elsewhere)}) == 18.0
    assert supervisor_signals.without_ranks_s(recorded) == 58.0
    monkeypatch.setenv("TRAINCKPT_GRACE", "40 s")
    assert supervisor_signals.without_ranks_s({}) == 38.0, "what is ours is not in it"
    assert supervisor_signals.without_ranks_s(recorded) == 38.0, "what is set here counts"


def test_what_a_process_does_about_a_signal_is_read_from_proc():
    me = os.getpid()
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert handles(me, signal.SIGUSR1)
        assert not handles(me, signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert handles(me, signal.SIGUSR2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_time_left_counts_from_the_signal_that_is_acted_on_not_from_the_first_ever(
    tmp_path, monkeypatch
):
    """An earlier one was answered: the command went on."""
    reasons = []

    class Asked:
        taken = None

        def notice(self, reason, ranks):
            reasons.append(reason)
            return True

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("TRAINCKPT_GRACE", "40 s")
    with Inbox() as inbox, subprocess.Popen(["sleep", "60"]) as process:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.next(1.0) == signal.SIGTERM
        inbox.stop_s = inbox.came_s - 1000.0
        assert inbox.next(1.0) == signal.SIGTERM
        came_s = inbox.came_s
        launched = LaunchMonitor(
            process, tmp_path, inbox, has_agent=False, ours=False, dumper=Asked()
        )
        assert launched._dumped_instead("SIGTERM", signal.SIGTERM, [])
        assert inbox.stop_s == came_s, "nor does what is copied afterwards"
        process.kill()
        assert inbox.next(0.0) is None
        assert inbox.came_s is None
    assert 30.0 < reasons[0].seconds_left <= 38.0
