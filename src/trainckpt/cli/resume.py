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

from trainckpt.cli import dump_home, dumps, named, show
from trainckpt.cli.run import report, say
from trainckpt.errors import ConfigurationError, NothingToResume
from trainckpt.lifecycle.places import place, slower
from trainckpt.lifecycle.places.everywhere import open_everywhere
from trainckpt.lifecycle.run import launch
from trainckpt.lifecycle.run.options import read_options
from trainckpt.snapshot import attempts
from trainckpt.supervisor.command import take_max_restarts, torchrun_command
from trainckpt.supervisor.early_stop import (
    ask_to_be_queued_again,
    before_launch,
    unless_signalled,
)
from trainckpt.supervisor.held import HeldMemory
from trainckpt.supervisor.record import BY_SUPERVISOR, NamedRun
from trainckpt.supervisor.signals import heard
from trainckpt.supervisor.supervise import RESTART_VARIABLE, supervise

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.supervisor.signals import Inbox
    from trainckpt.supervisor.supervise import Ended
    from trainckpt.tiers.places import Place

TIERS_VARIABLE, RESUME_VARIABLE = "TRAINCKPT_TIERS", "TRAINCKPT_RESUME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--at", metavar="SNAPSHOT", help="go on from this one, on a new branch")
    parser.add_argument("--nproc", type=show.count, help="processes (default: as recorded)")
    parser.add_argument(
        "--max-restarts", "--max_restarts", metavar="N",
        help="start it again where it fails, so many times",
    )  # fmt: skip
    parser.add_argument(
        "--tiers", metavar="URLS",
        help="slower tiers of the run, with commas; where its place is lost, it goes on from them",
    )  # fmt: skip
    parser.add_argument(
        "--accept-older", action="store_true",
        help="go on although a place that does not answer may hold a newer one",
    )  # fmt: skip
    dumps.add_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Launch the newest attempt's command, where and as it was launched."""
    with heard() as inbox:
        again = unless_signalled(partial(_looked, arguments), inbox)
        ended = before_launch(inbox) if again is None else _resumed(again, arguments, inbox)
        ask_to_be_queued_again(ended, inbox, facts=again.facts if again is not None else None)
    return report(ended, as_json=arguments.json)


def _looked(arguments: argparse.Namespace) -> _Again:
    """What is to be launched; nothing is yet."""
    tier, given = _place(arguments)
    facts, elsewhere = _recorded(tier, arguments.run, given)
    if arguments.at and not elsewhere:  # else the script's own place may hold more
        named.must_be_there(tier, arguments.run, given, arguments.at)
    command, kind, nproc = launch.recorded_command(facts)
    command = _here(command) if elsewhere else command
    nproc = arguments.nproc or nproc
    with_torchrun = kind != launch.PYTHON or nproc > 1
    prefix = f"torchrun --nproc-per-node={nproc} " if with_torchrun else ""
    say(prefix + shlex.join(launch.redact_arguments(command)))
    restarts, cwd = _max_restarts(arguments), _folder(facts, elsewhere)
    environment = _variables(facts, arguments, given, elsewhere)
    environment |= _place_for_script(tier, facts, arguments.run in elsewhere)
    run = None if elsewhere else tier.url
    return _Again(tier, facts, command, cwd, nproc, environment, with_torchrun, restarts, run)


def _resumed(again: _Again, arguments: argparse.Namespace, inbox: Inbox) -> Ended:
    """From a dump, if there is one; else from a snapshot."""
    with contextlib.closing(HeldMemory()) as memory:
        dumped = None
        if again.run is not None:
            launched, restarts = (again.command, again.cwd, again.nproc), again.restarts
            dumped = dumps.restored(again.tier, arguments, launched, inbox, memory, restarts)
        if dumped is not None and not dumped.again:
            return dumped
        return _launched(again, arguments, inbox, memory, dumped)


@dataclass(frozen=True)
class _Again:
    """What is launched, and as what; `run`: its place, where that is known to go on."""

    tier: Place
    facts: Mapping[str, Any]
    command: list[str]
    cwd: str
    nproc: int
    environment: dict[str, str]
    with_torchrun: bool
    restarts: int
    run: str | None


def _launched(
    again: _Again,
    arguments: argparse.Namespace,
    inbox: Inbox,
    memory: HeldMemory,
    dumped: Ended | None,
) -> Ended:
    """From a snapshot; `dumped`: how processes ended that were brought back before."""
    command, environment, restarts, done = again.command, again.environment, again.restarts, 0
    by_us = again.facts["launch"].get("by") == BY_SUPERVISOR  # a command without a Checkpointer
    name = None
    if by_us:
        own = {**os.environ, **environment}
        name = partial(NamedRun, again.tier.url, command, again.cwd, again.nproc, own)
    if again.with_torchrun:
        command = torchrun_command(again.nproc, ["--no-python"], command)
    if dumped is not None:
        done, restarts = 1, restarts - 1
        environment = {**environment, RESTART_VARIABLE: "1"}
        say(f"{dumped.why}; started again, not from the dump: that is used up")
    ended = supervise(
        command,
        environment=environment,
        cwd=again.cwd,
        output=sys.stderr if arguments.json else None,
        max_restarts=restarts,
        ours=not by_us,
        name=name,
        say=say,
        inbox=inbox,
        run=again.run,
        dumpable=dumps.dumpable(arguments, say),
        memory=memory,
        before=dumped.record if dumped is not None else None,
    )
    return replace(ended, restarts=ended.restarts + done)


def _place(arguments: argparse.Namespace) -> tuple[Place, list[str]]:
    """The run's place, with what it has lost of a dump, and the tiers that are named."""
    tier = place.open_place(arguments.run)
    given = dumps.named_tiers(arguments)
    if not (arguments.at or arguments.nproc):
        dump_home.bring_home(tier, arguments.run, given, say)
    return tier, given


def _max_restarts(arguments: argparse.Namespace) -> int:
    wanted = arguments.max_restarts
    return take_max_restarts([] if wanted is None else [f"--max-restarts={wanted}"])[1]


def _recorded(
    tier: Place, run: str, given: Sequence[str]
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The facts of the newest attempt that left its command, and the tiers they come from.

    None of those if the run's own place holds them: then the run goes on there. Else its place is
    wherever the script says, and gets what the tiers hold.
    """
    if attempts.run_id(tier) is not None:
        records: Mapping[int, AttemptRecord] = attempts.read_attempts(tier)
        elsewhere = [run] if slower.is_copy(records, tier) else []
    else:
        try:
            everywhere = open_everywhere(run, *given)
        except NothingToResume as error:
            raise named.no_run(run, error) from error
        records, elsewhere = everywhere.records, [*given, *read_options({}).tiers]
    told = [r for _, r in sorted(records.items(), reverse=True) if r.facts.get("argv")]
    if not told:
        raise NothingToResume(
            f"no attempt of {tier.url} left its command", hint="start the script again as before"
        )
    return told[0].facts, elsewhere


def _here(command: list[str]) -> list[str]:
    """A command that was recorded on another machine, perhaps: Python may lie elsewhere here."""
    first = Path(command[0])
    if first.is_absolute() and not first.exists() and first.name.startswith("python"):
        say(f"{first} is not there: {sys.executable} is taken")
        return [sys.executable, *command[1:]]
    return command


def _folder(facts: Mapping[str, Any], elsewhere: Sequence[str]) -> str:
    """The working directory; of a run that comes from another machine, perhaps this one."""
    cwd = facts.get("cwd")
    if isinstance(cwd, str) and Path(cwd).is_dir():
        return cwd
    if elsewhere:
        say(f"the recorded working directory {cwd} is not there: launching in {Path.cwd()}")
        return str(Path.cwd())
    raise ConfigurationError(
        f"the recorded working directory {cwd} is not there",
        hint="start the script again as before, from wherever it lies now",
    )


def _place_for_script(tier: Place, facts: Mapping[str, Any], is_copy: bool) -> dict[str, str]:
    """What a script that names no place of its own goes by, as `trainckpt run --run` tells it."""
    where = facts.get(slower.WHERE) if is_copy else tier.url
    known = isinstance(where, str) and launch.REDACTED not in where
    return {place.NAME_VARIABLE: str(where)} if known else {}


def _variables(
    facts: Mapping[str, Any],
    arguments: argparse.Namespace,
    given: Sequence[str],
    elsewhere: Sequence[str],
) -> dict[str, str]:
    """What was recorded and this environment lacks, and what the options say."""
    variables = {
        name: value
        for name, value in launch.recorded_environment(facts).items()
        if name not in os.environ and launch.REDACTED not in value
    }
    if arguments.at:
        variables[launch.AT_VARIABLE] = arguments.at
    if arguments.accept_older:
        variables[launch.ACCEPT_OLDER_VARIABLE] = "1"
    before = variables.get(TIERS_VARIABLE) or os.environ.get(TIERS_VARIABLE) or ""
    urls = given or [url.strip() for url in before.split(",") if url.strip()]
    urls = [*urls, *(url for url in elsewhere if url not in urls)]
    if urls:
        variables[TIERS_VARIABLE] = ",".join(urls)
    if elsewhere:  # somebody has named the run, so it is meant, wherever its place was
        variables[RESUME_VARIABLE] = "required"
    return variables
