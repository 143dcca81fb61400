"""resume: launch a run's recorded command again, from its newest usable checkpoint."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import launch
from trainckpt.attempt.options import read_options
from trainckpt.cli import dumps, output
from trainckpt.cli.run import report, say
from trainckpt.errors import ConfigurationError, NothingToResume, TrainckptError, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import names
from trainckpt.launcher.early_requeue import ask_to_be_queued_again, before_launch, unless_signalled
from trainckpt.launcher.supervise import RESTART_VARIABLE, supervise
from trainckpt.launcher.supervisor_record import BY_SUPERVISOR, NamedRun
from trainckpt.launcher.supervisor_signals import signal_inbox
from trainckpt.launcher.torchrun_command import take_max_restarts, torchrun_command
from trainckpt.run_directory import recorded_place, run_url, tier_config
from trainckpt.run_directory.run_tiers import open_everywhere
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.snapshot.catalog import Candidate
from trainckpt.storage import replica_slots
from trainckpt.storage.redact import REDACTED, redact_arguments
from trainckpt.storage.shared_memory import SharedMemoryDir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.launcher.supervise import RunResult
    from trainckpt.launcher.supervisor_signals import Inbox
    from trainckpt.storage.base import RunTier


# ---- the target: which run and snapshot the user's words mean
#
# A launch that cannot find it would end in a traceback of the script, and leave a failed attempt.


def must_be_there(tier: RunTier, run: str, given: Sequence[str], wanted: str) -> None:
    """Refuse a snapshot that no launch would find.

    Args:
        tier, run: The run's place, which holds it, and how it was called.
        given: URLs of tiers on the command line.
        wanted: What the snapshot is called.

    Raises:
        UnusableSnapshot: there is none of that name, or it was not committed.
    """
    with contextlib.suppress(UnusableSnapshot):
        catalog.find(_in_memory(tier.url), wanted)
        return
    everywhere = open_everywhere(run, *given)
    if everywhere.silent:
        return  # a tier that does not answer now may hold it: the launch finds out
    candidate = catalog.find(everywhere.candidates(), wanted, tier.url)
    if candidate.manifest is None:
        raise candidate.refusal(tier.url)


def _in_memory(url: str) -> Iterator[Candidate]:
    """Yield snapshots that a launch may bring from this host's memory to the run directory."""
    memory = SharedMemoryDir.found(url)
    if memory is None:
        return
    for folder in memory.folders():
        data = replica_slots.read_manifest(memory, folder, manifests.MAX_BYTES)
        with contextlib.suppress(UnusableSnapshot):
            manifest = manifests.load(data or b"", folder)
            yield Candidate(manifest.name, manifest, usable=True)


def no_run(run: str, error: NothingToResume) -> NothingToResume:
    """Return the error for a URL `run` without a run: `error`, or a guess at the intended URL."""
    run_part, snapshot = names.split_target(run)
    if snapshot is None or not _is_run(run_part):
        return error
    at_option = f" --at {shlex.quote(snapshot)}" if snapshot else ""
    return NothingToResume(
        f"{error.message}; there is one at {run_part}",
        hint=f"trainckpt resume {shlex.quote(run_part)}{at_option}",
    )


def _is_run(run: str) -> bool:
    with contextlib.suppress(TrainckptError):  # that one was not asked for
        return attempt_history.run_id(run_url.open_run_tier(run)) is not None
    return False


# ---- the command


TIERS_VARIABLE, RESUME_VARIABLE = "TRAINCKPT_TIERS", "TRAINCKPT_RESUME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN", help="run directory or URL")
    parser.add_argument(
        "--at", metavar="SNAPSHOT", help="resume from this snapshot, on a new branch"
    )
    parser.add_argument(
        "--nproc", type=output.count, metavar="N", help="processes (default: as recorded)"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        metavar="N",
        help="restarts after failures (default: none)",
    )
    parser.add_argument(
        "--tiers",
        metavar="URLS",
        help="slower tiers, with commas, to resume from if the run directory is lost",
    )
    parser.add_argument(
        "--accept-older",
        action="store_true",
        help="resume even if an unreachable tier may have a newer snapshot",
    )
    dumps.add_arguments(parser)


@dataclass(frozen=True, kw_only=True)
class _Relaunch:
    """The launch command and the run directory it resumes, if known."""

    tier: RunTier
    facts: Mapping[str, Any]
    command: list[str]
    cwd: str
    nproc: int
    environment: dict[str, str]
    with_torchrun: bool
    restarts: int
    run: str | None


def execute(arguments: argparse.Namespace) -> int:
    """Launch the newest attempt's command, where and as it was launched."""
    with signal_inbox() as inbox:
        relaunch = unless_signalled(partial(_planned, arguments), inbox)
        result = before_launch(inbox) if relaunch is None else _resumed(relaunch, arguments, inbox)
        facts = relaunch.facts if relaunch is not None else None
        ask_to_be_queued_again(result, inbox, facts=facts)
    return report(result, as_json=arguments.json)


def _planned(arguments: argparse.Namespace) -> _Relaunch:
    """Return the launch to make, without starting anything."""
    tier = run_url.open_run_tier(arguments.run)
    tier_urls = dumps.named_tiers(arguments)
    facts, elsewhere = _recorded(tier, arguments.run, tier_urls)
    if arguments.at and not elsewhere:  # else the script's own place may hold more
        must_be_there(tier, arguments.run, tier_urls, arguments.at)
    command, kind, nproc = launch.recorded_command(facts)
    cwd = _folder(facts, elsewhere)
    if not elsewhere:
        former = facts.get(recorded_place.PLACE)
        recorded_place.must_not_name_former(tier, former, command, cwd)
    command = _here(command) if elsewhere else command
    nproc = arguments.nproc or nproc
    with_torchrun = kind != launch.PYTHON or nproc > 1
    prefix = f"torchrun --nproc-per-node={nproc} " if with_torchrun else ""
    say(prefix + shlex.join(redact_arguments(command)))
    limit = arguments.max_restarts
    _, restarts = take_max_restarts([] if limit is None else [f"--max-restarts={limit}"])
    environment = _variables(facts, arguments, tier_urls, elsewhere)
    # for a script that names no run directory itself
    place_url = facts.get(recorded_place.PLACE) if arguments.run in elsewhere else tier.url
    if isinstance(place_url, str) and REDACTED not in place_url:
        environment[run_url.NAME_VARIABLE] = place_url
    return _Relaunch(
        tier=tier,
        facts=facts,
        command=command,
        cwd=cwd,
        nproc=nproc,
        environment=environment,
        with_torchrun=with_torchrun,
        restarts=restarts,
        run=None if elsewhere else tier.url,
    )


def _resumed(relaunch: _Relaunch, arguments: argparse.Namespace, inbox: Inbox) -> RunResult:
    """Resume from a dump, if there is one; else, or if that failed, from a snapshot."""
    launched = (relaunch.command, relaunch.cwd, relaunch.nproc)
    command, environment, restarts = relaunch.command, relaunch.environment, relaunch.restarts
    dumped = None
    if relaunch.run is not None:
        dumped = dumps.restored(relaunch.tier, arguments, launched, inbox, restarts)
    if dumped is not None and not dumped.again:
        return dumped
    by_us = relaunch.facts["launch"].get("by") == BY_SUPERVISOR  # a command without a Checkpointer
    name = None
    if by_us:
        variables = {**os.environ, **environment}
        name = partial(NamedRun, relaunch.tier.url, *launched, environment=variables)
    if relaunch.with_torchrun:
        command = torchrun_command(relaunch.nproc, ["--no-python"], command)
    if dumped is not None:
        environment = {**environment, RESTART_VARIABLE: "1"}
        say(f"{dumped.why}; started again, not from the dump: that is used up")
    result = supervise(
        command,
        environment=environment,
        cwd=relaunch.cwd,
        output=sys.stderr if arguments.json else None,
        max_restarts=restarts - (dumped is not None),
        ours=not by_us,
        name=name,
        say=say,
        inbox=inbox,
        run=relaunch.run,
        dumpable=dumps.dumpable(arguments, say),
        before=dumped.record if dumped is not None else None,
    )
    return replace(result, restarts=result.restarts + (dumped is not None))


def _recorded(
    tier: RunTier, run: str, given: Sequence[str]
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the facts of the newest attempt with a recorded command, and their tiers.

    None of those if the run's own place holds them: then the run goes on there. Else its place is
    wherever the script says, and gets what the tiers hold.
    """
    if attempt_history.run_id(tier) is not None:
        records: Mapping[int, AttemptRecord] = attempt_history.read_attempts(tier)
        elsewhere = [run] if tier_config.is_copy(records, tier) else []
    else:
        try:
            everywhere = open_everywhere(run, *given)
        except NothingToResume as error:
            raise no_run(run, error) from error
        records, elsewhere = everywhere.records, [*given, *read_options({}).tiers]
    with_command = [r for _, r in sorted(records.items(), reverse=True) if r.facts.get("argv")]
    if not with_command:
        raise NothingToResume(
            f"no attempt of {tier.url} recorded its command",
            hint="start the script again as before",
        )
    return with_command[0].facts, elsewhere


def _here(command: list[str]) -> list[str]:
    """Adapt a recorded command to this machine: its Python may be elsewhere."""
    program = Path(command[0])
    if program.is_absolute() and not program.exists() and program.name.startswith("python"):
        say(f"{program} is not there: {sys.executable} is taken")
        return [sys.executable, *command[1:]]
    return command


def _folder(facts: Mapping[str, Any], elsewhere: Sequence[str]) -> str:
    """Return the recorded working directory; this one if it does not exist here."""
    cwd = facts.get("cwd")
    if isinstance(cwd, str) and Path(cwd).is_dir():
        return cwd
    if elsewhere:
        say(f"the recorded working directory {cwd} is missing, launching in {Path.cwd()}")
        return str(Path.cwd())
    raise ConfigurationError(
        f"the recorded working directory {cwd} is missing",
        hint="start the script again as before, from its present directory",
    )


def _variables(
    facts: Mapping[str, Any],
    arguments: argparse.Namespace,
    given: Sequence[str],
    elsewhere: Sequence[str],
) -> dict[str, str]:
    """Return the recorded variables that this environment lacks, and those of the options."""
    variables = {
        name: value
        for name, value in launch.recorded_environment(facts).items()
        if name not in os.environ and REDACTED not in value
    }
    if arguments.at:
        variables[launch.AT_VARIABLE] = arguments.at
    if arguments.accept_older:
        variables[launch.ACCEPT_OLDER_VARIABLE] = "1"
    tiers_text = variables.get(TIERS_VARIABLE) or os.environ.get(TIERS_VARIABLE) or ""
    urls = given or [url.strip() for url in tiers_text.split(",") if url.strip()]
    urls = [*urls, *(url for url in elsewhere if url not in urls)]
    if urls:
        variables[TIERS_VARIABLE] = ",".join(urls)
    if elsewhere:  # the command names the run, so it is meant, wherever its place was
        variables[RESUME_VARIABLE] = "required"
    return variables
