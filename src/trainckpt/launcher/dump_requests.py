"""Requests to the supervisor, and its answers: files in the run's place, beside the notices.

    RUN/notices/<attempt>-<id>.ask      {"reason", "seconds_left", "mode", "dump"}
    RUN/notices/<attempt>-<id>.answer   {"choice", "why", "error"}

A notice (`.json`) goes to the ranks, who stop at a boundary. A request goes to the supervisor, who
chooses between that and a dump of the processes, and says what it chose; whoever asked then writes
the notice, if that is the answer. Answers are for requests: one that nobody waits for is removed
with the attempt's other garbage. A notice is written here only to ranks that hear no signals.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.preemption.notice_file import MAX_BYTES, parse
from trainckpt.run_directory import run_url

if TYPE_CHECKING:
    from trainckpt.storage.base import Tier

ASK, ANSWER = ".ask", ".answer"
LOOKING = "looking"  # a first answer: GPUs may take their time until there is a choice


@dataclass(frozen=True)
class DumpCall:
    """One request.

    Attributes:
        key: Where it lies.
        reason, seconds_left, mode: As of a notice.
        dump: A dump was asked for.
    """

    key: str
    reason: str
    seconds_left: float | None = None
    mode: str | None = None
    dump: bool = False


@dataclass(frozen=True)
class DumpAnswer:
    """The supervisor's choice and its reason; `error` says why a dump failed."""

    choice: str
    why: str
    error: str = ""


def find(tier: Tier, attempt: int, seen: set[str]) -> DumpCall | None:
    """The first request to this attempt's supervisor that is not in `seen`, and is added to it."""
    with contextlib.suppress(TrainckptError):
        for name in tier.list(names.NOTICES):
            if name.startswith(f"{attempt}-") and name.endswith(ASK) and name not in seen:
                seen.add(name)
                if request := _read(tier, f"{names.NOTICES}/{name}"):
                    return request
    return None


def answer(tier: Tier, request: DumpCall, found: DumpAnswer) -> None:
    """Say what was chosen; a place that refuses has to do without."""
    body = {"choice": found.choice, "why": found.why, "error": found.error}
    with contextlib.suppress(TrainckptError):
        tier.replace(answer_key(request.key), json.dumps(body).encode())


def write_notice(run: str, attempt: int, reason: str, seconds_left: float | None) -> None:
    """Have the ranks of an attempt stop; not waited for: its place may be slow, or refuse."""

    def write() -> None:
        left_s = None if seconds_left is None else max(seconds_left, 0.0)
        body = json.dumps({"reason": reason, "seconds_left": left_s})
        key = f"{names.NOTICES}/{attempt}-{secrets.token_hex(8)}.json"
        with contextlib.suppress(TrainckptError):
            run_url.open_other_place(run).replace(key, body.encode())

    threading.Thread(target=write, name="trainckpt-notice", daemon=True).start()


def answer_key(key: str) -> str:
    """Return the key of the answer to the request at `key`."""
    return key.removesuffix(ASK) + ANSWER


def read_answer(tier: Tier, key: str) -> DumpAnswer | None:
    """The answer to the request at `key`, if it is there."""
    with contextlib.suppress(TrainckptError, ValueError, RecursionError, TypeError):
        body = json.loads(tier.read(answer_key(key), max_bytes=MAX_BYTES))
        return DumpAnswer(*(str(body[part]) for part in ("choice", "why", "error")))
    return None


def _read(tier: Tier, key: str) -> DumpCall | None:
    try:
        body = json.loads(tier.read(key, max_bytes=MAX_BYTES))
        notice = parse(body)
    except (TrainckptError, ValueError, RecursionError):
        return None  # no request: nobody waits for an answer to it
    return DumpCall(key, notice.reason, notice.seconds_left, notice.mode, body.get("dump") is True)
