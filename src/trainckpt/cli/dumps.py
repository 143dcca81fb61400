"""List the process dumps of a run, restore the newest, and read the options for them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.heartbeat import attempt_is_alive, is_alive
from trainckpt.attempt.launch import PYTHON
from trainckpt.attempt.options import read_options
from trainckpt.attempt.status_files import RankStatus, parse_status
from trainckpt.cli.output import tell
from trainckpt.dumping.old_dumps import why_superseded
from trainckpt.encryption.keys import read_identities
from trainckpt.errors import (
    ConfigurationError,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format.names import MANIFEST, SnapshotName
from trainckpt.launcher.dumper import Dumpable, ability_for
from trainckpt.launcher.early_requeue import before_launch
from trainckpt.launcher.restored_dump import (
    LISTENS,
    AlreadyResumed,
    RestoredDump,
    StoppedBefore,
    supervise_restored,
)
from trainckpt.launcher.supervisor_record import BY_SUPERVISOR, NamedRun
from trainckpt.process_dump import criu, encrypted_images, restore
from trainckpt.process_dump.dump import this_host
from trainckpt.process_dump.restore import RestoreBlocked
from trainckpt.run_directory import recorded_place, run_url
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.run_directory.tier_config import is_copy
from trainckpt.snapshot import attempt_history
from trainckpt.storage import replica_slots
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.dump import DumpName, DumpRecord
    from trainckpt.launcher.supervise import RunResult
    from trainckpt.launcher.supervisor_signals import Inbox
    from trainckpt.storage.base import RunTier, Tier


# ---- dumps in a run directory, and why one cannot be restored


@dataclass(frozen=True)
class Dump:
    """A committed dump.

    Attributes:
        name, record: Its name; its record if that is readable.
        reason: Why a resume does not restore it, or "".
        is_used: It was restored already.
        is_superseded: No resume restores it any more, on whatever host.
    """

    name: DumpName
    record: DumpRecord | None
    reason: str
    is_used: bool = False
    is_superseded: bool = False


def dumps_of(tier: Tier) -> list[Dump]:
    """Return every dump of the run at a place, newest first.

    Earlier versions copied dumps to slower tiers; no resume restores such a copy.
    """
    run = attempt_history.run_id(tier) if isinstance(tier, LocalTier) else None
    found = restore.names_in(tier) if run is not None else []
    if run is None or not found:
        return []
    records = attempt_history.read_attempts(tier)
    if is_copy(records, tier):
        return []
    return [_inspect(tier, run, name, records) for name in found]


def _inspect(tier: Tier, run: str, name: DumpName, records: Mapping[int, AttemptRecord]) -> Dump:
    is_used = any(record.parent == str(name) for record in records.values())
    superseded, record = why_superseded(name, records), None
    try:
        record = restore.load(tier, run, name)
        reason = superseded or _why_not(tier, record)
    except TrainckptError as error:
        reason = superseded or error.message
    return Dump(name, record, reason, is_used, bool(superseded))


def _why_not(tier: Tier, record: DumpRecord) -> str:
    """Return why a dump cannot be restored here, or ""."""
    if reason := restore.why_not(record, this_host()):
        return reason
    snapshot = SnapshotName.parse(record.snapshot)
    if snapshot is not None and tier.size(f"{snapshot.folder}/{MANIFEST}") is None:
        return f"the snapshot {snapshot}, which holds what it lacks, is gone"
    for image in record.images:
        path = Path(tier.url) / record.name.image(image.name)
        if reason := restore.why_incomplete(path, image):
            return f"the image {image.name} {reason}"
    return _why_elsewhere(tier, record)


def _why_elsewhere(tier: Tier, record: DumpRecord) -> str:
    """Return why the processes would save in another directory than this one, or "".

    Their run directory was moved, or this is a copy of it. Without a Checkpointer they save
    nothing.
    """
    for name, text in record.told.items():
        with contextlib.suppress(ValueError, RecursionError):
            status = parse_status(json.loads(text), RankStatus) if name.startswith("rank") else None
            if status is None or status.attempt is None:
                continue
            if not recorded_place.is_at(tier, status.run):
                return f"its processes save to {status.run}, where it was taken"
    return ""


# ---- options, and restoring


VARIABLE = "TRAINCKPT_DUMPS"
OFF = "off"
CHOICES = ("auto", "on", OFF)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of whatever launches a command."""
    parser.add_argument(
        "--dumps",
        choices=CHOICES,
        help="allow process dumps: launch without io_uring, terminal and standard input "
        "(default: auto, if CRIU works)",
    )
    parser.add_argument(
        "--keep-io-uring",
        action="store_true",
        help="allow io_uring to the command; an open one prevents dumps",
    )


def dumpable(arguments: argparse.Namespace, say: Callable[[str], object]) -> Dumpable | None:
    """Return the launch settings for dumps, by the options and TRAINCKPT_DUMPS; None: no dumps.

    Raises:
        ConfigurationError: dumps were asked for, and cannot be had.
    """
    mode = arguments.dumps or os.environ.get(VARIABLE) or "auto"
    if mode not in CHOICES:
        raise ConfigurationError(f"{VARIABLE} is {mode[:60]!r}", hint=" or ".join(CHOICES))
    ability = ability_for(mode)
    if ability is None:
        return None
    if ability.why_not:
        raise ConfigurationError(f"--dumps on: {ability.why_not}", hint=ability.cure)
    return Dumpable(ability, say, arguments.keep_io_uring)


def restored(
    tier: RunTier,
    arguments: argparse.Namespace,
    command: tuple[list[str], str, int],
    inbox: Inbox,
    max_restarts: int = 0,
) -> RunResult | None:
    """Restore the newest dump and return the result of the restored command; None: no dump, or an
    unusable one.

    Raises:
        AlreadyResumed: another process resumes from it: nothing is launched beside it.
        UnusableSnapshot, TierUnavailable: it cannot be, and there is nothing else to go on from.
    """
    is_declined = arguments.at or arguments.nproc or arguments.dumps == OFF
    if not isinstance(tier, LocalTier) or is_declined:
        return None
    dumped: RestoredDump | None = None
    try:
        record = _newest(tier)
        if record is None:
            return None
        dumped = _dumped(tier, record, arguments, command, max_restarts)
        return supervise_restored(dumped, inbox)
    except StoppedBefore as error:
        _say(error.message)
        return before_launch(inbox)
    except (AlreadyResumed, ConfigurationError):
        raise  # without an identity: the snapshots want the same
    except TrainckptError as error:
        _say(f"no dump is restored: {error.message}")
        is_used_up = dumped is not None and dumped.named.record is not None
        if is_used_up or _has_snapshot(tier, arguments):
            return None
        kind = TierUnavailable if isinstance(error, TierUnavailable) else UnusableSnapshot
        resume_command = f"trainckpt resume {tier.url}"
        raise kind(
            f"{error.message}; there is no snapshot, and the dump stays as it is",
            hint=f"{f'{error.hint}, then ' if error.hint else ''}{resume_command}; "
            f"or from the beginning: {resume_command} --dumps off",
        ) from error


def _dumped(
    tier: LocalTier,
    record: DumpRecord,
    arguments: argparse.Namespace,
    command: tuple[list[str], str, int],
    max_restarts: int,
) -> RestoredDump:
    key = _key(record)
    ability = dumpable(arguments, _say)
    if ability is None:
        here = criu.examine()
        reason = f"{VARIABLE} is {OFF}"
        if os.environ.get(VARIABLE) != OFF:
            reason = here.why_not or "CRIU failed its check a moment ago, and now passes"
        raise RestoreBlocked(f"{record.name} cannot be restored: {reason}", hint=here.cure)
    facts = attempt_history.read_attempts(tier)[record.name.attempt].facts
    if facts["launch"].get("by") != BY_SUPERVISOR:  # it has a Checkpointer
        facts = {LISTENS: record.name.attempt, **facts}
    return RestoredDump(
        tier,
        record,
        NamedRun(arguments.run, *command),
        facts,
        ability,
        output=sys.stderr if arguments.json else None,
        has_agent=facts["launch"].get("kind") != PYTHON or command[2] > 1,
        max_restarts=max_restarts,
        key=key,
    )


def _has_snapshot(tier: LocalTier, arguments: argparse.Namespace) -> bool:
    """Return True if the command, launched again, would find a snapshot in any tier."""
    memory = SharedMemoryDir.found(tier.url)
    if memory is not None and any(
        replica_slots.MANIFEST in replica_slots.files(memory, each) for each in memory.folders()
    ):
        return True
    with contextlib.suppress(TrainckptError):
        everywhere = open_everywhere(arguments.run, *named_tiers(arguments))
        return any(each.usable for each in everywhere.candidates())
    return False


def named_tiers(arguments: argparse.Namespace) -> list[str]:
    """URLs of the tiers that `--tiers` names."""
    return [url.strip() for url in (arguments.tiers or "").split(",") if url.strip()]


def remind(run: str) -> None:
    """Say that a dump is there from which this launch does not go on: its script may be another."""
    with contextlib.suppress(TrainckptError):
        tier = run_url.open_run_tier(run)
        newest = next(iter(dumps_of(tier)), None)
        if newest is not None and not newest.reason:
            _say(
                f"{newest.name} is not restored: `trainckpt resume {tier.url}` does that, "
                "`trainckpt run` launches anew"
            )


def _newest(tier: RunTier) -> DumpRecord | None:
    """Return the dump to restore, and report why not a newer one; None: there is none.

    Raises:
        AlreadyResumed: the attempt that went on from it is alive.
        RestoreBlocked: it cannot be restored here and now.
    """
    newest = next(iter(dumps_of(tier)), None)
    if newest is None:
        return None
    if newest.is_used:
        _must_be_over(tier, newest.name)
        return None
    if newest.is_superseded:
        _say(f"{newest.name} is not restored: {newest.reason}")
        return None
    if newest.reason:
        raise RestoreBlocked(f"{newest.name} is not restored: {newest.reason}")
    assert newest.record is not None
    _say(f"{newest.name} is the newest of this run: it was taken because of {newest.record.reason}")
    return newest.record


def _must_be_over(tier: RunTier, name: DumpName) -> None:
    """Refuse a resume beside processes restored on this host a moment ago, as to one in between.

    The heart of killed ones beats for a while longer.
    """
    records = attempt_history.read_attempts(tier)
    record = records[max(records)]
    if record.parent != str(name) or record.outcome is not None:
        return
    pids = record.facts.get("pids")
    is_there = isinstance(pids, list) and any(
        type(p) is int and p > 0 and is_alive(p) for p in pids
    )
    if is_there and attempt_is_alive(tier, record.attempt):
        raise AlreadyResumed(
            f"attempt {record.attempt} went on from {name} and is alive",
            hint=f"trainckpt pause {tier.url}",
        )


def _key(record: DumpRecord) -> bytes:
    """Return the key of the dump's images. Nothing is launched without it, since the snapshots need
    the same identity.

    Raises:
        ConfigurationError: there is no identity, or one that it is not encrypted to.
        UnusableSnapshot: what was wrapped was changed.
    """
    if not record.keys:
        return b""
    path = read_options({}).identity
    return encrypted_images.key_of(record, () if path is None else read_identities(path))


def _say(line: str) -> None:
    tell(f"trainckpt: {line}")
