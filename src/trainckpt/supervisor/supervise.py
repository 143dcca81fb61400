"""The supervisor: launches a command, passes signals on, and knows how the attempt ended.

torchrun returns 1 whatever its workers return, so the exit code comes from the attempt's record:
rank 0 writes where that lies, or with which code it was refused, into a file named by
TRAINCKPT_SUPERVISOR. An attempt that died without a word gets its outcome written here, as
`killed`.

Signals go to the launched process alone (torchrun passes them to its ranks); SIGUSR1, of which
torchrun would die, is passed as SIGTERM. A second SIGINT kills everything at once. After an end
that was not in order nothing is left behind: torchrun puts its ranks into sessions of their own,
so they are found by their parents, and orphans by the variable that they inherited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.format.attempt import ENDED, KILLED, STOPPED, UNDECIDED
from trainckpt.lifecycle import place
from trainckpt.lifecycle.told import REFUSED, SUPERVISOR_VARIABLE, read_told
from trainckpt.snapshot import attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
INTERRUPTED = 130
KILL_ROUNDS, KILL_ROUND_S = 20, 0.02
TORCHRUN_GRACE_S = "600"  # torchrun's own 30 s would cut a save short; the deadline is not its


@dataclass(frozen=True)
class Ended:
    """How a launched attempt ended.

    Attributes:
        exit_code: What to return to whoever launched us.
        record: The attempt's record, or None if the command made no Checkpointer.
    """

    exit_code: int
    record: AttemptRecord | None


def torchrun_command(nproc: int, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """`command` under torchrun with `nproc` processes on this host.

    The `--` keeps torchrun's parser away from the script's own options.
    """
    number = [] if any(o.startswith(("--nproc-per-node", "--nproc_per_node")) for o in options) \
        else [f"--nproc-per-node={nproc}"]  # fmt: skip
    return [
        sys.executable, "-m", "torch.distributed.run", *number, *options, "--", *command
    ]  # fmt: skip


def split_torchrun_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `[torchrun options] [--] SCRIPT ARGS` where the script begins."""
    from torch.distributed.run import get_args_parser

    known = get_args_parser()._option_string_actions
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        name, equals, _ = arguments[at].partition("=")
        action = known.get(name)
        if action is None:
            raise ConfigurationError(
                f"{name} is an option neither of trainckpt run nor of torchrun",
                hint="put `--` before the script if it is the script's",
            )
        at += 1 if equals or action.nargs == 0 else 2
    command = list(arguments[at:])
    return list(arguments[:at]), command[1:] if command[:1] == ["--"] else command


def supervise(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
    output: Any = None,
    watch: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Ended:
    """Run `command` to its end, in a session of its own, passing signals on.

    Args:
        command: What to execute.
        environment: Variables on top of this process's.
        cwd: Working directory.
        output: Where its stdout goes (and stderr, if it is a file of ours); None: inherited.
        watch: Called with the process while it runs, in place of waiting for it.
    """
    with tempfile.TemporaryDirectory(prefix="trainckpt-") as folder:
        told = Path(folder)
        variables = {
            **os.environ,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": TORCHRUN_GRACE_S,
            **(environment or {}),
            SUPERVISOR_VARIABLE: str(told),
        }
        with _Signals() as signals:
            process = _start(command, variables, cwd, output)
            signals.pass_to(process)
            if watch is not None:
                watch(process)
            code = process.wait()
            code = 128 - code if code < 0 else code
            if code:
                _kill_all(process, str(told))
            ended = _outcome(told, code)
            return Ended(INTERRUPTED, ended.record) if signals.interrupts > 1 else ended


def _start(
    command: Sequence[str], variables: Mapping[str, str], cwd: str | None, output: Any
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, env=dict(variables), cwd=cwd, stdout=output,
            stderr=subprocess.STDOUT if output not in (None, sys.stderr) else None,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigurationError(
            f"{command[0]} cannot be started: {error}", hint="check the command and its path"
        ) from error


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the launched process and all it started, as the loss of a host would."""
    environment = _environment(process.pid)
    _kill_all(process, environment.get(SUPERVISOR_VARIABLE, ""))


def _outcome(told: Path, code: int) -> Ended:
    ranks = read_told(told)
    if not ranks:
        return Ended(code, None)
    where = ranks[min(ranks)]
    if where.attempt is None:
        refused = where.exit_code if where.how == REFUSED and code else None
        return Ended(code if refused is None else refused, None)
    tier = place.open_directory(where.run)
    try:
        record = attempts.read_attempts(tier).get(where.attempt)
        if record is None or record.outcome is None:
            if record is not None:
                record = record.with_(state=ENDED, outcome=_killed(record, code))
                attempts.replace(tier, record)
            return Ended(code, record)
    except TrainckptError:
        return Ended(code, None)
    own = record.outcome.get("exit_code")
    if record.outcome.get("outcome") == STOPPED and type(own) is int:
        return Ended(own, record)
    return Ended(own if type(own) is int and own and code else code, record)


def _killed(record: AttemptRecord, code: int) -> dict[str, Any]:
    """The outcome of an attempt that died without a word."""
    parent = record.parent if record.parent != UNDECIDED else None
    snapshot = record.newest_commit or parent
    started = record.facts.get("started")
    return {
        "outcome": KILLED,
        "snapshot": snapshot,
        "kind": "snapshot",
        "exactness": None,
        "lost_micro_batches": None,
        "tiers": ["local"] if snapshot else [],
        "seconds": round(time.time() - started, 3) if isinstance(started, (int, float)) else None,
        "exit_code": code,
        "reason": "ended without a word: killed, or crashed",
    }


class _Signals:
    """While it is entered, signals that this process gets are passed on to the launched one.

    Attributes:
        interrupts: How many were SIGINT.
    """

    def __init__(self) -> None:
        self.interrupts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for name in PASSED_ON:
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on, and what has come since `__enter__`."""
        self._process = process
        for number in self._early:
            self._send(number)

    def _pass_on(self, number: int, _: Any) -> None:
        self.interrupts += number == signal.SIGINT
        if self._process is None:
            self._early.append(number)
        elif self.interrupts > 1:
            kill_session(self._process)
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        assert self._process is not None
        is_user = number == getattr(signal, "SIGUSR1", None)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM if is_user else number)


def _kill_all(process: subprocess.Popen[bytes], told: str) -> None:
    """Kill it, all that descends from it, and all that was told to tell us of its attempt."""
    for _ in range(KILL_ROUNDS):  # a process may be forking while the list is made
        members = _members(process.pid if process.returncode is None else None, told)
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            break
        time.sleep(KILL_ROUND_S)
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)


def _members(leader: int | None, told: str) -> list[int]:
    """Living processes that descend from `leader`, or whose environment holds `told`."""
    children: dict[int, list[int]] = {}
    living, marked = set(), []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(pid)
        if state not in "ZX":
            living.add(pid)
            if told and _environment(pid).get(SUPERVISOR_VARIABLE) == told:
                marked.append(pid)
    found: set[int] = set()
    queue = marked if leader is None else [leader, *marked]
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, [])
    return sorted(found & living - {os.getpid()})


def _environment(pid: int) -> dict[str, str]:
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in block.split("\0"))}
