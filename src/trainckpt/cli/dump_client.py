"""Asking a run's supervisor for a dump, and waiting for what it says and does."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from trainckpt.dumping.dump_choice import NOTHING
from trainckpt.errors import NoAgreement
from trainckpt.launcher import dump_requests
from trainckpt.launcher.dump_requests import DumpAnswer
from trainckpt.launcher.record import BY_SUPERVISOR
from trainckpt.launcher.restored import LISTENS
from trainckpt.process_dump import criu

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Place

ANSWERS_WITHIN_S, CHOOSES_WITHIN_S = 15.0, 150.0
LOOK_EVERY_S, SAY_EVERY_S = 0.1, 10.0
NOBODY = "its supervisor does not answer: it was not launched by `trainckpt run` with dumps"


def is_by_supervisor(live: AttemptRecord) -> bool:
    """Return True if the command has no Checkpointer, so its supervisor keeps the record."""
    launch = live.facts.get("launch")
    return isinstance(launch, dict) and launch.get("by") == BY_SUPERVISOR


def can_be_dumped(live: AttemptRecord) -> bool:
    """Return True if the supervisor was able to dump when the attempt began."""
    launch = live.facts.get("launch")
    return isinstance(launch, dict) and launch.get("dumps") is True


def listens_as(live: AttemptRecord) -> int:
    """The number under which its ranks look for notices: processes that were restored keep it."""
    number = live.facts.get(LISTENS)
    return number if type(number) is int else live.attempt


def wait_for_answer(tier: Place, key: str, live: AttemptRecord) -> DumpAnswer:
    """Return the supervisor's choice; a missing answer is a choice too."""
    start, within_s, reason = time.monotonic(), ANSWERS_WITHIN_S, ""
    while time.monotonic() < start + within_s:
        answer = dump_requests.read_answer(tier, key)
        if answer is not None and answer.choice != dump_requests.LOOKING:
            return answer
        if answer is not None:
            within_s, reason = CHOOSES_WITHIN_S, "its supervisor has not chosen in time"
        time.sleep(LOOK_EVERY_S)
    return DumpAnswer(NOTHING, reason or _why_nobody(live))


def _why_nobody(live: AttemptRecord) -> str:
    """By default a command is launched with dumps where they can be had: why not here."""
    hosts = live.facts.get("hosts")
    if not isinstance(hosts, list) or set(hosts) != {socket.gethostname()}:
        return NOBODY
    ability = criu.examine()
    if ability.why_not:
        return f"{NOBODY}, and on this host {ability.why_not} ({ability.cure})"
    return f"{NOBODY}, which this host can do: trainckpt run --dumps on"


def wait_for_dump(
    tier: Place,
    key: str,
    read: Callable[[], AttemptRecord],
    limit_s: float | None,
    say: Callable[[str], None],
) -> AttemptRecord | DumpAnswer:
    """The attempt's record once it was dumped, or the answer that says why it was not.

    What is being dumped gives no sign of life, so whether anybody still dumps it is not known.

    Raises:
        NoAgreement: neither came within `limit_s`.
    """
    start = last_said = time.monotonic()
    while True:
        record = read()
        if record.outcome is not None:
            return record
        answer = dump_requests.read_answer(tier, key)
        if answer is not None and answer.error:
            return answer
        now = time.monotonic()
        if limit_s is not None and now - start >= limit_s:
            raise NoAgreement(
                f"attempt {record.attempt} was not dumped in the time that was left, "
                f"{limit_s:.1f} s; it may be yet",
                hint=f"trainckpt list --attempts {tier.url}",
            )
        if now - last_said >= SAY_EVERY_S:
            last_said = now
            say(f"waiting for the dump, {now - start:.0f} s")
        time.sleep(LOOK_EVERY_S)
