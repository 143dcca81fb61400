"""Signals of a supervisor: queued for the main thread, and the decisions on them.

`trainckpt` receives signals before it imports the module of its verb, which takes a second: a job
may be stopped at once. The verb takes over the signals that came (`signal_inbox`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.launch import recorded_options
from trainckpt.attempt.status_files import CLAIMED, LISTENING, RETURNED
from trainckpt.errors import INTERRUPTED, REFUSALS, START_AGAIN, ConfigurationError
from trainckpt.format.attempt_record import FAILED, FINISHED, KILLED, STOPPED
from trainckpt.preemption import kubernetes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.attempt.status_files import RankStatus
    from trainckpt.launcher.outcome import Outcome


HEARD = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGXCPU")
MAY_BE_IGNORED = ("SIGINT", "SIGHUP")  # by a shell's background job, by nohup: then they stay so
ENDED = 0  # no signal has this number: the launched process has ended


class Inbox:
    """Queue of signals: while it is entered, they come here instead of ending this process.

    Main thread only, as Python wants it; `put` may be called by any thread.
    """

    def __init__(self) -> None:
        self.first = ""  # name of the first signal
        self.interrupts = self.count = 0  # numbers of SIGINT, and of all signals
        # arrival of the signal that began the present stop, set by its handler; on `time.monotonic`
        self.stop_s: float | None = None
        self.came_s: float | None = None  # arrival of the signal that `next` returned last
        self.is_attended = True  # else a second SIGINT ends this process at once
        self._queue: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._before: dict[int, Any] = {}

    @property
    def signalled(self) -> bool:
        """True once any signal has come."""
        return self.count > 0

    def __enter__(self) -> Inbox:
        for name in HEARD:
            number = getattr(signal, name, None)
            ignored = number is not None and signal.getsignal(number) is signal.SIG_IGN
            if number is not None and not (ignored and name in MAY_BE_IGNORED):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def put(self, number: int) -> None:
        """Let `next` return this number."""
        self._queue.put((number, time.monotonic()))

    def next(self, timeout_s: float) -> int | None:
        """Return the next signal's number, or None if none comes in time."""
        self.came_s = None
        with contextlib.suppress(queue.Empty):
            number, self.came_s = self._queue.get(timeout=max(timeout_s, 0.0))
            return number
        return None

    def _hear(self, number: int, _: Any) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number).name
        self.interrupts += number == signal.SIGINT
        self._queue.put((number, time.monotonic()))  # safe in a handler: SimpleQueue is re-entrant
        if self.interrupts > 1 and not self.is_attended:
            os._exit(INTERRUPTED)


_early: list[Inbox] = []  # at most one


def buffer_signals() -> None:
    """Keep signals from now on until `signal_inbox` is entered."""
    inbox = Inbox()
    inbox.is_attended = False
    _early[:] = [inbox.__enter__()]


@contextlib.contextmanager
def signal_inbox() -> Iterator[Inbox]:
    """Yield an inbox, with the signals since `buffer_signals`, if that was called."""
    inbox = _early.pop() if _early else Inbox().__enter__()
    inbox.is_attended = True
    try:
        yield inbox
    finally:
        inbox.__exit__()


# ---- decisions on signals, lost ranks, deadlines and failures
#
# A signal goes to the ranks that handle it, not to torchrun: torchrun would pass it to the whole
# process group, loader workers included, and then kill what is left at a time of its own. Where no
# rank handles it there is nothing to save: either the script is still starting, or it has no
# Checkpointer.
#
# Ranks with a Checkpointer report the grace of a stop. A command without one has the grace of its
# launch: TRAINCKPT_GRACE, or trainckpt.toml.


# Actions on a signal: send it to ranks; to ranks and nested supervisors, each of which answers for
# its own ranks; to the script. Or end the launch, kill it at once, do nothing.
TO_RANKS, TO_NESTED, TO_SCRIPT = "to ranks", "to nested", "to script"
END, KILL, NOTHING = "end", "kill", "nothing"

OTHERS_S = 10.0  # after a rank died, what the others get to finish what is in flight
MARGIN, MOST_MARGIN_S = 0.1, 2.0  # of the grace: for us to end the ranks and write it down
NEVER_AGAIN = REFUSALS | {0, START_AGAIN, INTERRUPTED}
IN_ORDER = (STOPPED, FINISHED)


@dataclass(frozen=True)
class RankProcess:
    """One rank of this host that has reported."""

    status: RankStatus
    at: float  # when it reported (`time.time`)
    alive: bool
    code: int | None = None  # exit code, negative for a signal; None while it is not known

    @property
    def handles_signals(self) -> bool:
        """True if a signal sent to this rank becomes a notice."""
        return self.alive and self.status.state in (LISTENING, CLAIMED)

    @property
    def is_stopping(self) -> bool:
        """Stopped, and about to end; not where its script goes on after the stop."""
        return self.status.how == STOPPED and self.status.state != RETURNED

    @property
    def is_gone(self) -> bool:
        """Dead, and not in order."""
        return not self.alive and self.status.how not in IN_ORDER and self.code != 0


@dataclass(frozen=True)
class SignalAction:
    """The supervisor's action on a signal."""

    what: str
    pids: tuple[int, ...] = ()  # for `TO_RANKS` and `TO_NESTED`
    number: int = 0  # the signal to send them


def about_signal(
    number: int,
    ranks: Sequence[RankProcess],
    *,
    ours: bool,
    interrupts: int,
    nested: tuple[int, ...] = (),
    agent: int | None = None,
) -> SignalAction:
    """Return the action on a signal.

    Args:
        number: The signal.
        ranks: Ranks of this host that have reported.
        ours: The command is known to use trainckpt.
        interrupts: Number of SIGINT so far, this one included.
        nested: Process ids of living nested supervisors.
        agent: Process id of a torchrun that would start its ranks again after their stop.
    """
    receivers = [rank for rank in ranks if rank.handles_signals]
    if nested and not receivers and interrupts <= 2:  # the second one has it end its ranks at once
        return SignalAction(TO_NESTED, nested, number)
    if interrupts > 1:
        return SignalAction(KILL)
    if agent is not None and ranks:  # it passes the signal on, and leaves the other hosts' agents
        return SignalAction(TO_RANKS, (agent,), signal.SIGTERM)
    if receivers:  # one would do; SIGHUP and SIGUSR1 are no notices to every release of a rank
        stop_signal = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        pids = tuple(rank.status.pid for rank in receivers if not rank.status.deaf)
        return SignalAction(TO_NESTED if nested else TO_RANKS, (*pids, *nested), stop_signal)
    if not ranks:
        return SignalAction(END if ours else TO_SCRIPT)
    alive_ranks = [rank for rank in ranks if rank.alive]
    if not alive_ranks or any(rank.is_stopping for rank in alive_ranks):
        return SignalAction(NOTHING)
    return SignalAction(TO_SCRIPT)  # the training is over; what the script does now is its own


def may_be_dumped_instead(action: SignalAction, ranks: Sequence[RankProcess], number: int) -> bool:
    """Return True if a dump may replace the delivery of a signal.

    Ranks that have a notice of their own are leaving already. Ctrl-C at a command without a
    Checkpointer is to end it.
    """
    if any(rank.status.asked for rank in ranks):
        return False
    has_no_ranks = action.what == TO_SCRIPT and not ranks and number != signal.SIGINT
    return action.what == TO_RANKS or has_no_ranks


def deadline_after_s(ranks: Sequence[RankProcess]) -> float | None:
    """Return the seconds that the ranks have after a signal; None: no limit."""
    graces_s = [rank.status.grace_s for rank in ranks if rank.status.grace_s is not None]
    return less_margin_s(min(graces_s)) if graces_s else None


def nested_deadline_s(graces_s: Sequence[float]) -> float | None:
    """Return the same for a nested supervisor; it needs half of the margin to end its ranks."""
    shortest_s = min(graces_s, default=None)
    return None if shortest_s is None else (shortest_s + less_margin_s(shortest_s)) / 2


def less_margin_s(grace_s: float) -> float:
    """Return a grace without the time that the supervisor needs to end the ranks and record it."""
    return grace_s - min(MOST_MARGIN_S, MARGIN * grace_s)


def others_s(ranks: Sequence[RankProcess]) -> float:
    """Return the seconds that the other ranks get after a rank died, to finish or to save.

    More if the living ones report that they save without it (`survivors`).
    """
    return OTHERS_S + max(
        (rank.status.survives_s or 0.0 for rank in ranks if rank.alive), default=0
    )


def someone_is_lost(ranks: Sequence[RankProcess]) -> bool:
    """Return True if a rank is lost and others may wait for it in vain.

    Ranks that finished or stopped do not wait: they take their time.
    """
    alive = [rank for rank in ranks if rank.alive]
    if any(rank.is_gone for rank in ranks):
        return not alive or any(rank.status.how not in IN_ORDER for rank in alive)
    return any(r.status.how == FAILED for r in alive) and any(r.handles_signals for r in alive)


def starts_again(outcome: Outcome, *, done: int, most: int, signalled: bool) -> bool:
    """Return True if another launch follows this outcome, after `done` of `most` restarts.

    `signalled`: a signal has come, so its sender decides about the next start.
    """
    by_itself = outcome.how in (FAILED, KILLED) and not outcome.on_purpose and not signalled
    return by_itself and outcome.exit_code not in NEVER_AGAIN and done < most


def without_ranks_s(facts: Mapping[str, Any]) -> float | None:
    """Return the usable seconds after a signal, by the options in an attempt's facts, or None."""
    try:
        granted_s = recorded_options(facts).grace or kubernetes.granted_s(os.environ)
    except ConfigurationError:
        return None
    return None if granted_s is None else less_margin_s(granted_s)


def host_returns() -> bool:
    """Return True if this host is expected to be there again after the stop.

    A signal does not say that a host is lost; the notices of clouds do, and the ranks receive
    those. A pod is gone for good: its process ids and its files are made anew.
    """
    return not kubernetes.in_pod(os.environ)
