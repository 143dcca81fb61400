"""What `run`, `resume` and `pause` share about process dumps."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from trainckpt.cli.aside import tell
from trainckpt.cli.dumped import dumps_of
from trainckpt.encryption.keys import read_identities
from trainckpt.errors import ConfigurationError, TrainckptError, UnusableSnapshot
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.places.everywhere import open_everywhere
from trainckpt.lifecycle.run.launch import PYTHON
from trainckpt.lifecycle.run.options import read_options
from trainckpt.process_dump import criu, sealed_images
from trainckpt.process_dump.restore import NotNow
from trainckpt.snapshot import attempts
from trainckpt.supervisor.dumpable import Dumpable
from trainckpt.supervisor.dumping import ability_for
from trainckpt.supervisor.record import BY_SUPERVISOR, NamedRun
from trainckpt.supervisor.restored import LISTENS, Dumped, GoesOn, supervise_restored
from trainckpt.tiers import kept
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.memory import MemoryPlace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from trainckpt.format.dump import DumpRecord
    from trainckpt.supervisor.held import HeldMemory
    from trainckpt.supervisor.signals import Inbox
    from trainckpt.supervisor.supervise import Ended
    from trainckpt.tiers.places import Place

VARIABLE = "TRAINCKPT_DUMPS"
OFF = "off"
CHOICES = ("auto", "on", OFF)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of whatever launches a command."""
    parser.add_argument(
        "--dumps",
        choices=CHOICES,
        help="launch it so that its processes can be dumped: without io_uring, terminal and "
        "standard input (auto: where CRIU works)",
    )
    parser.add_argument(
        "--keep-io-uring",
        action="store_true",
        help="leave io_uring to the command; while one is open it cannot be dumped",
    )


def dumpable(arguments: argparse.Namespace, say: Callable[[str], object]) -> Dumpable | None:
    """How to launch, by the options and TRAINCKPT_DUMPS; None: as if there were no dumps.

    Raises:
        ConfigurationError: dumps were asked for, and cannot be had.
    """
    wanted = arguments.dumps or os.environ.get(VARIABLE) or "auto"
    if wanted not in CHOICES:
        raise ConfigurationError(f"{VARIABLE} is {wanted[:60]!r}", hint=" or ".join(CHOICES))
    ability = ability_for(wanted)
    if ability is None:
        return None
    if ability.why_not:
        raise ConfigurationError(f"--dumps on: {ability.why_not}", hint=ability.cure)
    return Dumpable(ability, say, arguments.keep_io_uring)


def restored(
    tier: Place,
    arguments: argparse.Namespace,
    command: tuple[list[str], str, int],
    inbox: Inbox,
    memory: HeldMemory,
    max_restarts: int = 0,
) -> Ended | None:
    """How the newest dump ended that was brought back; None: there is none, or it cannot be.

    `memory`: where its ranks' is held.

    Raises:
        GoesOn: somebody else goes on from it: nothing is launched beside that.
        UnusableSnapshot: it cannot be, and there is nothing else to go on from.
    """
    declined = arguments.at or arguments.nproc or arguments.dumps == OFF
    if not isinstance(tier, LocalTier) or declined:
        return None
    try:
        record = _newest(tier)
        if record is None:
            return None
        dumped = _dumped(tier, record, arguments, command, max_restarts)
        return supervise_restored(dumped, inbox, memory)
    except GoesOn:
        raise
    except NotNow as error:
        _say(f"no dump is restored: {error.message}")
        if _has_snapshot(tier, arguments):
            return None
        again = f"trainckpt resume {tier.url}"
        raise UnusableSnapshot(
            f"{error.message}; there is no snapshot, and the dump stays as it is",
            hint=f"{f'{error.hint}, then ' if error.hint else ''}{again}; "
            f"or from the beginning: {again} --dumps off",
        ) from error
    except ConfigurationError:
        raise  # no identity: the snapshots want the same
    except TrainckptError as error:
        _say(f"no dump is restored: {error.message}")
        return None


def _dumped(
    tier: LocalTier,
    record: DumpRecord,
    arguments: argparse.Namespace,
    command: tuple[list[str], str, int],
    max_restarts: int,
) -> Dumped:
    key = _key(record)
    how = dumpable(arguments, _say)
    if how is None:
        can = criu.examine()
        why = can.why_not or f"{VARIABLE} is {OFF}"
        raise NotNow(f"{record.name} cannot be restored: {why}", hint=can.cure)
    argv, cwd, nproc = command
    before = attempts.read_attempts(tier)[record.name.attempt].facts
    has_checkpointer = before["launch"].get("by") != BY_SUPERVISOR
    facts = {LISTENS: record.name.attempt} if has_checkpointer else {}
    return Dumped(
        tier, record, NamedRun(arguments.run, argv, cwd, nproc), {**facts, **before}, how,
        output=sys.stderr if arguments.json else None,
        has_agent=before["launch"].get("kind") != PYTHON or nproc > 1,
        max_restarts=max_restarts, key=key,
    )  # fmt: skip


def _has_snapshot(tier: LocalTier, arguments: argparse.Namespace) -> bool:
    """Whether the command, launched again, would find anything to go on from, in any tier."""
    memory = MemoryPlace.found(tier.url)
    if memory is not None and any(
        kept.MANIFEST in kept.files(memory, each) for each in memory.folders()
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
        tier = place.open_place(run)
        found = dumps_of(tier)[:1]
        if found and not found[0].reason:
            _say(f"{found[0].name} is not restored: `trainckpt resume {tier.url}` does that, "
                 "`trainckpt run` launches anew")  # fmt: skip


def _newest(tier: Place) -> DumpRecord | None:
    """The dump to bring back; says why that, or why not the newest one.

    Raises:
        NotNow: nothing newer is there, and it is of no use here.
    """
    found = dumps_of(tier)[:1]
    if not found or found[0].is_used:
        return None
    newest = found[0]
    if newest.is_superseded:
        _say(f"{newest.name} is not restored: {newest.reason}")
        return None
    if newest.reason:
        raise NotNow(f"{newest.name} is not restored: {newest.reason}")
    assert newest.record is not None
    _say(f"{newest.name} is the newest of this run: it was taken because of {newest.record.reason}")
    return newest.record


def _key(record: DumpRecord) -> bytes:
    """Of its images. Without it nothing is launched: the snapshots want the same identity.

    Raises:
        ConfigurationError: there is no identity, or one that it is not encrypted to.
        UnusableSnapshot: what was wrapped was changed.
    """
    if not record.keys:
        return b""
    path = read_options({}).identity
    return sealed_images.key_of(record, () if path is None else read_identities(path))


def _say(line: str) -> None:
    tell(f"trainckpt: {line}")
