"""How a launch ended, from what everybody said: pure, so each mixture of words is a row."""

from __future__ import annotations

import math

import pytest

from trainckpt.attempt.status_files import CLAIMED, LEFT, LISTENING, RankStatus
from trainckpt.launcher import outcome
from trainckpt.launcher.outcome import LaunchHistory, classify
from trainckpt.launcher.torchrun_agent import RankExit

T = 1000.0


def said(rank: int, how: str | None = None, code: int | None = None, *, at: float = T):
    """A rank's last word; its process is 100 + rank."""
    state = LEFT if how else CLAIMED
    return RankStatus(rank, 100 + rank, "h", "/run", 1, state, how=how, exit_code=code), at


def end(rank: int, code: int, at: float = T) -> RankExit:
    return RankExit(100 + rank, code, at, rank)


@pytest.mark.parametrize(
    ("history", "code", "how"),
    [
        # a command without a Checkpointer
        (LaunchHistory(0), 0, "finished"),
        (LaunchHistory(5), 5, "failed"),
        (LaunchHistory(143), 143, "killed"),
        (LaunchHistory(1, ends=[end(1, 3), end(0, -15, T + 1)]), 3, "failed"),
        (LaunchHistory(1, ends=[end(0, 1), end(1, 3, T + 0.1)]), 3, "failed"),
        (LaunchHistory(1, ends=[end(0, 1), end(1, -9, T + 0.1)]), 137, "killed"),
        (LaunchHistory(1, ends=[end(0, 1), end(1, -9, T + 1.5)]), 137, "killed"),
        (LaunchHistory(1, ends=[end(0, 1), end(1, 7, T + 9)]), 1, "failed"),
        # torchrun waited for it before its end was seen
        (
            LaunchHistory(1, [said(0, "failed", 1), said(1)], [end(0, 1), end(1, -9, math.inf)]),
            137,
            "killed",
        ),
        (
            LaunchHistory(1, [said(0, "stopped", 75, at=T + 1), said(1)], [end(1, -9, math.inf)]),
            137,
            "killed",
        ),
        (
            LaunchHistory(1, [said(0, "stopped", 75), said(1)], [end(1, -15, math.inf)]),
            75,
            "stopped",
        ),
        (LaunchHistory(1, [said(0, "failed", 1), said(1)], [end(1, -15, math.inf)]), 1, "failed"),
        # stops
        (
            LaunchHistory(
                1,
                [said(0, "stopped", 75), said(1, "stopped", 75)],
                [end(0, 75), end(1, -15, T + 1)],
            ),
            75,
            "stopped",
        ),
        (LaunchHistory(0, [said(0, "stopped", 75)]), 75, "stopped"),
        (LaunchHistory(1, [said(0, "stopped", 85)]), 85, "stopped"),
        (LaunchHistory(1, [said(1, "stopped", 75)]), 75, "stopped"),
        (LaunchHistory(1, [said(0, "stopped", 75), said(1)], [end(1, -9, T + 1)]), 75, "stopped"),
        # torchrun's SIGTERM after a failure makes the others stop: that is no stop
        (LaunchHistory(1, [said(0, "stopped", 75, at=T + 1), said(1, "failed", 3)]), 3, "failed"),
        (
            LaunchHistory(1, [said(0, "stopped", 75, at=T + 1), said(1)], [end(1, -9)]),
            137,
            "killed",
        ),
        (
            LaunchHistory(
                1, [said(0, "stopped", 75, at=T + 1), said(1)], [end(1, -9)], signalled=True
            ),
            75,
            "stopped",
        ),
        # failures that were said
        (LaunchHistory(1, [said(0, "failed", 1), said(1, "failed", 3, at=T + 0.1)]), 3, "failed"),
        (
            LaunchHistory(1, [said(0, "failed", 71, at=T + 20), said(1)], [end(1, -9)]),
            137,
            "killed",
        ),
        (LaunchHistory(1, [said(0, "failed", 74)], [end(0, 1)]), 74, "failed"),
        (
            LaunchHistory(1, [said(0, "refused", 66), said(1, "refused", 66)], [end(0, 1)]),
            66,
            "refused",
        ),
        (LaunchHistory(1, [said(1, "refused", 78)]), 78, "refused"),
        (LaunchHistory(0, [said(0, "refused", 66)]), 0, "finished"),
        (LaunchHistory(0, [said(0, "failed", 1)]), 0, "finished"),
        # after the training: the script is the script's
        (
            LaunchHistory(1, [said(0, "finished", 0), said(1, "finished", 0)], [end(1, 3)]),
            3,
            "failed",
        ),
        # between two runs, or after the last one, a signal that the script got
        (
            LaunchHistory(143, [said(0, "finished", 0)], [end(0, -15)], to_script="SIGTERM"),
            75,
            "notice",
        ),
        (
            LaunchHistory(
                143, [said(0, "finished", 0)], [end(0, -15)], to_script="SIGTERM", start_again=85
            ),
            85,
            "notice",
        ),
        (
            LaunchHistory(138, [said(0, "finished", 0)], [end(0, -15)], to_script="SIGUSR1"),
            75,
            "notice",
        ),
        (
            LaunchHistory(143, [said(0, "finished", 0)], [end(0, 7)], to_script="SIGTERM"),
            7,
            "failed",
        ),
        (LaunchHistory(143, [said(0, "finished", 0)], [end(0, -15)]), 143, "killed"),
        # a watcher
        (LaunchHistory(1, [said(0), said(1)], [end(0, 71), end(1, 71)], ours=True), 71, "killed"),
        # we ended it
        (LaunchHistory(137, [said(0)], cause=outcome.SECOND_INTERRUPT), 130, "killed"),
        (LaunchHistory(137, cause=outcome.START_UP), 75, "notice"),
        (LaunchHistory(137, cause=outcome.START_UP, start_again=85), 85, "notice"),
        (
            LaunchHistory(137, [said(0)], cause=outcome.DUMPED, dump="d", start_again=85),
            85,
            "stopped",
        ),
        (LaunchHistory(1, ends=[end(1, -15)], ours=True, start_again=85), 85, "notice"),
        (
            LaunchHistory(137, [said(0)], [end(0, -9, T)], cause=outcome.DEADLINE, ended_at=T - 1),
            71,
            "killed",
        ),
        (
            LaunchHistory(137, [said(0, "stopped", 75)], cause=outcome.DEADLINE, ended_at=T),
            75,
            "stopped",
        ),
        (
            LaunchHistory(
                137,
                [said(0), said(1)],
                [end(1, -11), end(0, -9, T + 10)],
                cause=outcome.OTHERS_LOST,
                ended_at=T + 9,
            ),
            139,
            "killed",
        ),
        # SIGTERM to a rank that did not listen yet
        (LaunchHistory(1, ends=[end(1, -15), end(0, -15, T + 0.1)], ours=True), 75, "notice"),
        (LaunchHistory(1, ends=[end(1, -10)], ours=True), 75, "notice"),
        (LaunchHistory(1, ends=[end(1, -9)], ours=True), 137, "killed"),
        (LaunchHistory(1, ends=[end(1, -15)], ours=False), 143, "killed"),
        (LaunchHistory(1, [said(1)], [end(1, -15)], ours=True), 143, "killed"),
    ],
)
def test_every_mixture_of_words_has_one_code(history, code, how):
    """The first failure decides; what follows on it is consequence."""
    found = classify(history)
    assert (found.exit_code, found.how) == (code, how)
    assert found.why or history.cause


def test_the_reason_names_rank_and_signal():
    history = LaunchHistory(1, [said(0), said(1)], [end(1, -9), end(0, 1, T + 0.2)])
    assert classify(history).why == "rank 1 died of SIGKILL"


def test_a_rank_without_a_word_that_listened_is_not_in_start_up():
    told = RankStatus(1, 101, "h", "/run", None, LISTENING)
    assert classify(LaunchHistory(1, [(told, T)], [end(1, -15)], ours=True)).exit_code == 143
