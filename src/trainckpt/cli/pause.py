"""pause: save and stop a live run, and wait until it has stopped.

    find      the newest attempt without an outcome whose heartbeat is young
    ask       its supervisor, where the command has no Checkpointer, a dump was asked for, or there
              is a deadline: it chooses between a dump, a stop, and both, and dumps
    tell      a notice file for that attempt, in the run's place; its ranks look once a second
    wait      until its record has an outcome, then shortly for its heartbeat to be gone
    report    what was saved where, and the exit code that says so

A notice is never taken back: by the time it could be, the ranks may have agreed. One that is left
over names its attempt only, and stops no other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.cli import output
from trainckpt.cli.output import tell
from trainckpt.cli.run import KEYS
from trainckpt.dumping.dump_choice import DUMP, NOTHING
from trainckpt.errors import (
    INTERRUPTED,
    NoAgreement,
    NothingToResume,
    SaveFailed,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format import names
from trainckpt.format.attempt_record import FINISHED, MAX_BYTES, STOPPED, AttemptRecord
from trainckpt.format.duration import WANTED, parse_duration
from trainckpt.launcher import dumper
from trainckpt.launcher.dumper import DumpAnswer
from trainckpt.launcher.restored_dump import LISTENS
from trainckpt.launcher.supervisor_record import BY_SUPERVISOR
from trainckpt.process_dump import criu
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_tiers import no_run_at
from trainckpt.snapshot import attempt_history
from trainckpt.storage.denied_access import explain, is_denied
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from pathlib import Path

    from trainckpt.storage.base import RunTier

REASON = "trainckpt pause"
LOOK_EVERY_S, SAY_EVERY_S = 0.1, 10.0
LISTEN_EVERY_S = 1.0  # to the heartbeat
LEAVE_WITHIN_S = 5.0
# How long after a heartbeat is gone the outcome must be there, or the heartbeat again: between the
# last one of rank 0 and the first one of a dump, the other ranks come to rest.
SILENT_FOR_S = 10.0
DUMP_SILENT_FOR_S = 45.0  # besides the age of a heartbeat that counts: the host is busy then
NAMED_ATTEMPTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument(
        "--deadline",
        type=_duration,
        metavar="TIME",
        help='time for the run to stop, such as "30s" (default: no limit)',
    )
    parser.add_argument(
        "--dump",
        action="store_true",
        help="also dump the processes after the checkpoint is saved, if possible",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Tell the run to stop, wait, and report; 71 if it is not in time."""
    tier = run_url.open_run_tier(arguments.run)
    live = find_live(tier)
    if arguments.dump or is_by_supervisor(live) or (arguments.deadline and can_be_dumped(live)):
        dumped = _dumped(tier, live, arguments)
        if dumped is not None:
            return report(tier, dumped, as_json=arguments.json)
    world = live.facts.get("world")
    ranks = f", ranks: {world}," if isinstance(world, int) else ""
    try:
        notice = _tell(tier, live, arguments.deadline, dump=arguments.dump)
        _say(
            f"attempt {live.attempt} of {tier.url}{ranks} will stop at the next boundary shared by "
            "all ranks"
        )
        record = _wait(tier, live, arguments.deadline)
    except KeyboardInterrupt:
        sentence = f"interrupted; the notice stands, so attempt {live.attempt} may still stop"
        if arguments.json:
            output.document({"error": sentence, "code": INTERRUPTED, "hint": ""})
        else:
            tell(f"error: {sentence}")
        return INTERRUPTED
    with contextlib.suppress(TrainckptError):
        tier.remove(notice)
    return report(tier, record, as_json=arguments.json)


def find_live(tier: RunTier) -> AttemptRecord:
    """Return the newest attempt without an end and with a recent heartbeat.

    Raises:
        NothingToResume: there is none; says what was found.
    """
    if attempt_history.run_id(tier) is None:
        raise no_run_at(tier, "no live run: ")
    reasons = []
    for number, record in sorted(attempt_history.read_attempts(tier).items(), reverse=True):
        age = None if record.outcome else heartbeat.age_s(tier, number)
        if age is not None and age < heartbeat.ALIVE_S:
            return record
        reasons.append(_why_not(record, age))
    reason_text = "; ".join(reasons[:NAMED_ATTEMPTS]) or "no attempt was recorded"
    raise NothingToResume(
        f"no live run at {tier.url}: {reason_text}", hint=f"trainckpt list --attempts {tier.url}"
    )


def report(tier: RunTier, record: AttemptRecord, *, as_json: bool) -> int:
    """Print how the attempt ended; returns the exit code."""
    outcome = dict(record.outcome or {})
    sentence, code, hint = _verdict(tier, record.attempt, outcome)
    if as_json:
        error = {"error": sentence, "code": code, "hint": hint} if code else {}
        facts = {key: outcome.get(key) for key in (*KEYS, "exit_code", "reason")}
        facts |= {"no_dump": outcome["no_dump"]} if "no_dump" in outcome else {}
        output.document({"run": tier.url, "attempt": record.attempt, **facts, **error})
    elif code:
        tell(f"error: {sentence}\nnext: {hint}")
    else:
        print(sentence)
    return code


def _verdict(tier: RunTier, attempt: int, outcome: dict[str, Any]) -> tuple[str, int, str]:
    """Return a sentence, the exit code, and the next command."""
    ending, snapshot = outcome.get("outcome"), outcome.get("snapshot")
    lost, no_dump_reason = outcome.get("lost_micro_batches") or 0, outcome.get("no_dump")
    subject, resume_command = f"attempt {attempt}", f"trainckpt resume {tier.url}"
    saved_at = f"{snapshot} in {tier.url} ({', '.join(outcome.get('tiers') or ['?'])})"
    if ending == FINISHED:
        return f"{subject} finished before it could stop: {saved_at}", 0, ""
    if outcome.get("exit_code") == NoAgreement.exit_code:
        why = f"{subject} was killed, its ranks were too late: {outcome.get('reason')}"
        kept = f"; newest snapshot: {snapshot}" if snapshot else ""
        return f"{why}{kept}", NoAgreement.exit_code, resume_command
    if ending != STOPPED:
        kept = f"newest snapshot: {snapshot}" if snapshot else "it saved nothing"
        why = f" ({outcome['reason']})" if outcome.get("reason") else ""
        return (
            f"{subject} {ending} before it could stop{why}; {kept}",
            NothingToResume.exit_code,
            resume_command,
        )
    if snapshot is None:
        why = f"{subject} stopped, but nothing could be saved"
        return why, UnusableSnapshot.exit_code, f"see the run's own log, then {resume_command}"
    if lost:
        why = (
            f"{subject} stopped, but its last save failed: {saved_at} stands, "
            f"micro-batches lost: {lost}"
        )
        return why, SaveFailed.exit_code, f"see the run's own log, then {resume_command}"
    no_dump = f"; not dumped: {no_dump_reason}" if no_dump_reason else ""
    return f"{subject} stopped: saved {saved_at}{no_dump}", 0, ""


def _dumped(
    tier: RunTier, live: AttemptRecord, arguments: argparse.Namespace
) -> AttemptRecord | None:
    """Ask the supervisor; the record of the attempt once it is dumped, None if the ranks are to
    stop by themselves.

    Raises:
        SaveFailed: they cannot, and no dump was taken.
        NoAgreement: the time is over.
    """
    start = time.monotonic()
    key = _tell(tier, live, arguments.deadline, dump=arguments.dump, suffix=dumper.ASK)
    try:
        answer = wait_for_answer(tier, key, live)
        _say(f"{answer.choice}: {answer.why}")
        if answer.choice == DUMP:
            elapsed_s, limit_s = time.monotonic() - start, arguments.deadline
            left_s = None if limit_s is None else max(0.0, limit_s - elapsed_s)
            result = wait_for_dump(tier, key, live, left_s)
            if isinstance(result, AttemptRecord):
                return result
            answer = result
            _say(f"no dump: {answer.error}")
    finally:
        for request_key in (key, dumper.answer_key(key)):
            with contextlib.suppress(TrainckptError):
                tier.remove(request_key)
    if is_by_supervisor(live):
        raise SaveFailed(
            f"attempt {live.attempt} goes on: {answer.error or answer.why}",
            hint="`trainckpt doctor` says what this machine can do",
        )
    return None


def _tell(
    tier: RunTier,
    live: AttemptRecord,
    seconds_left: float | None,
    *,
    dump: bool = False,
    suffix: str = ".json",
) -> str:
    """Write the notice so that it appears whole; returns its key."""
    body = {"reason": REASON, "seconds_left": seconds_left, "mode": None, "dump": dump}
    # the ranks look for notices under this number; restored processes keep it
    listens = live.facts.get(LISTENS)
    number = listens if suffix != dumper.ASK and type(listens) is int else live.attempt
    key = f"{names.NOTICES}/{number}-{secrets.token_hex(8)}{suffix}"
    data = json.dumps(body).encode()
    if isinstance(tier, LocalTier):
        _write(tier, live.attempt, tier.root / key, data)
    else:
        tier.replace(key, data)
    return key


def _write(tier: LocalTier, attempt: int, target: Path, data: bytes) -> None:
    """Write the notice as a file readable by the ranks' user."""
    folder = target.parent
    temporary = folder / f".tmp-{target.stem}"
    try:
        owner = heartbeat.path_of(tier, attempt).stat()
        if folder.is_dir() and not os.access(folder, os.W_OK):
            with contextlib.suppress(OSError):  # another user's pause has made it and left it empty
                folder.rmdir()
        folder.mkdir(mode=0o700, exist_ok=True)
        _hand_over(folder, owner, 0o755)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        _hand_over(temporary, owner, 0o644)
        temporary.rename(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        whose = explain("write", target, tier.root)[0] if is_denied(error) else ""
        raise TierUnavailable(
            f"cannot write the notice {target}: {error.strerror or error}{whose}",
            hint="run trainckpt pause as the user of the run",
        ) from error


def _hand_over(path: Path, owner: os.stat_result, else_mode: int) -> None:
    """Give `path` to the run's user; where we may not, let others read it if it is ours."""
    found = path.stat()
    if os.name == "nt" or found.st_uid == owner.st_uid:
        return
    try:
        os.chown(path, owner.st_uid, owner.st_gid)
    except OSError:
        if found.st_uid == os.geteuid():
            path.chmod(else_mode)


def _wait(tier: RunTier, live: AttemptRecord, limit_s: float | None) -> AttemptRecord:
    """Wait for the attempt's end, and return its record.

    Raises:
        NoAgreement: the time is over.
        NothingToResume: its heartbeat stopped, and it left no outcome.
    """
    start = last_said = last_listened = time.monotonic()
    while True:
        record = _read(tier, live)
        now = time.monotonic()
        if record.outcome is not None:
            _wait_until_gone(tier, record.attempt)
            return record
        if limit_s is not None and now - start >= limit_s:
            raise NoAgreement(
                f"attempt {live.attempt} has not stopped within {limit_s:g} s; the notice stands, "
                "so it may still stop",
                hint=f"trainckpt pause {tier.url} waits on; trainckpt list --attempts {tier.url}",
            )
        if now - last_listened >= LISTEN_EVERY_S:
            last_listened = now
            if not heartbeat.attempt_is_alive(tier, live.attempt):
                ended = _late_outcome(tier, live)
                if ended is not None:
                    return ended
        if now - last_said >= SAY_EVERY_S:
            last_said = now
            newest = f"; newest snapshot: {record.newest_commit}" if record.newest_commit else ""
            _say(f"waiting, {now - start:.0f} s{newest}")
        time.sleep(LOOK_EVERY_S if isinstance(tier, LocalTier) else LISTEN_EVERY_S)


def _late_outcome(tier: RunTier, live: AttemptRecord) -> AttemptRecord | None:
    """Return the record of an attempt without heartbeat once it has an outcome.

    None if the heart beats again.
    """
    deadline = time.monotonic() + SILENT_FOR_S
    while (record := _read(tier, live)).outcome is None:
        if heartbeat.attempt_is_alive(tier, live.attempt):
            return None
        if time.monotonic() >= deadline:
            newest = record.newest_commit
            advice = f"newest snapshot: {newest}" if newest else "nothing saved"
            raise NothingToResume(
                f"attempt {live.attempt} died before it could stop, for an unknown reason; "
                f"{advice}",
                hint=f"trainckpt resume {tier.url}",
            )
        time.sleep(LOOK_EVERY_S)
    return record


def _wait_until_gone(tier: RunTier, attempt: int) -> None:
    deadline = time.monotonic() + LEAVE_WITHIN_S
    while heartbeat.age_s(tier, attempt) is not None and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)


def _read(tier: RunTier, live: AttemptRecord) -> AttemptRecord:
    """Return the attempt's current record; the previous one while it is being replaced."""
    key = attempt_history.record_key(live.attempt)
    try:
        return AttemptRecord.load(tier.read(key, max_bytes=MAX_BYTES), key)
    except UnusableSnapshot:
        return live


def _why_not(record: AttemptRecord, age: float | None) -> str:
    subject = f"attempt {record.attempt}"
    if record.outcome is not None:
        return f"{subject} {record.outcome.get('outcome')}"
    if age is not None:
        return f"{subject} left no outcome, and its last sign of life is {age:.0f} s old"
    return f"{subject} left no outcome, and gives no sign of life"


# ---- requests for a dump: ask the run's supervisor, and wait for its answers


ANSWERS_WITHIN_S, CHOOSES_WITHIN_S = 15.0, 150.0
NO_ANSWER = "its supervisor does not answer: it was not launched by `trainckpt run` with dumps"


def is_by_supervisor(live: AttemptRecord) -> bool:
    """Return True if the command has no Checkpointer, so its supervisor keeps the record."""
    return _launch(live).get("by") == BY_SUPERVISOR


def can_be_dumped(live: AttemptRecord) -> bool:
    """Return True if the supervisor was able to dump when the attempt began."""
    return _launch(live).get("dumps") is True


def _launch(live: AttemptRecord) -> dict[str, Any]:
    launch = live.facts.get("launch")
    return launch if isinstance(launch, dict) else {}


def wait_for_answer(tier: RunTier, key: str, live: AttemptRecord) -> DumpAnswer:
    """Return the supervisor's choice; a missing answer is a choice too."""
    start, within_s, reason = time.monotonic(), ANSWERS_WITHIN_S, ""
    while time.monotonic() < start + within_s:
        answer = dumper.read_answer(tier, key)
        if answer is not None and answer.choice != dumper.LOOKING:
            return answer
        if answer is not None:
            within_s, reason = CHOOSES_WITHIN_S, "its supervisor has not chosen in time"
        time.sleep(LOOK_EVERY_S)
    return DumpAnswer(NOTHING, reason or _why_no_answer(live))


def _why_no_answer(live: AttemptRecord) -> str:
    """Return the reason against dumps here, or ""; by default a command is launched with them."""
    hosts = live.facts.get("hosts")
    if not isinstance(hosts, list) or set(hosts) != {socket.gethostname()}:
        return NO_ANSWER
    ability = criu.examine()
    if ability.why_not:
        return f"{NO_ANSWER}, and on this host {ability.why_not} ({ability.cure})"
    return f"{NO_ANSWER}, which this host can do: trainckpt run --dumps on"


def wait_for_dump(
    tier: RunTier, key: str, live: AttemptRecord, limit_s: float | None
) -> AttemptRecord | DumpAnswer:
    """Return the attempt's record once it was dumped, or the answer with the reason against it.

    The supervisor writes the heartbeat while it dumps.

    Raises:
        NoAgreement: neither came within `limit_s`.
        NothingToResume: the supervisor gives no sign of life any more.
    """
    start = last_said = last_alive = last_listened = time.monotonic()
    while True:
        record = _read(tier, live)
        if record.outcome is not None:
            return record
        answer = dumper.read_answer(tier, key)
        if answer is not None and answer.error:
            return answer
        now = time.monotonic()
        if limit_s is not None and now - start >= limit_s:
            raise NoAgreement(
                f"attempt {record.attempt} was not dumped in the time that was left, "
                f"{limit_s:.1f} s; it may be yet",
                hint=f"trainckpt list --attempts {tier.url}",
            )
        if now - last_listened >= LISTEN_EVERY_S:
            last_listened = now
            if heartbeat.attempt_is_alive(tier, live.attempt):
                last_alive = now
        if now - last_alive >= DUMP_SILENT_FOR_S:
            raise NothingToResume(
                f"attempt {live.attempt} was not dumped: its supervisor was killed meanwhile, or "
                f"hangs; no sign of life for {DUMP_SILENT_FOR_S:.0f} s",
                hint=f"trainckpt list --attempts {tier.url}",
            )
        if now - last_said >= SAY_EVERY_S:
            last_said = now
            _say(f"waiting for the dump, {now - start:.0f} s")
        time.sleep(LOOK_EVERY_S)


# ---- words


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; use {WANTED}") from None


def _say(line: str) -> None:
    tell(f"pause: {line}")
