"""The supervisor: launches a command, passes signals on, and knows how the attempt ended.

torchrun returns 1 whatever its workers return, so the exit code comes from the attempt's record:
rank 0 writes where that lies into a file named by TRAINCKPT_SUPERVISOR. An attempt that died
without a word gets its outcome written here, as `killed`.

Signals go to the launched process alone (torchrun passes them to its ranks); SIGUSR1, of which
torchrun would die, is passed as SIGTERM. A second SIGINT kills everything at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.format.attempt import ENDED, FINISHED, KILLED, STOPPED
from trainckpt.lifecycle import place
from trainckpt.snapshot import attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
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
        told = Path(folder) / "attempt.json"
        variables = {
            **os.environ,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": TORCHRUN_GRACE_S,
            **(environment or {}),
            place.SUPERVISOR_VARIABLE: str(told),
        }
        process = subprocess.Popen(
            command, env=variables, cwd=cwd, stdout=output,
            stderr=subprocess.STDOUT if output not in (None, sys.stderr) else None,
            start_new_session=True,
        )  # fmt: skip
        with _signals_passed_to(process):
            if watch is not None:
                watch(process)
            code = process.wait()
        _kill_session(process.pid)
        return _outcome(told, 128 - code if code < 0 else code)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the launched process and all it started, as the loss of a host would."""
    _kill_session(process.pid)


def _outcome(told: Path, code: int) -> Ended:
    if not told.is_file():
        return Ended(code, None)
    where = json.loads(told.read_text(encoding="utf-8"))
    tier = place.open_directory(where["run"])
    try:
        record = attempts.read_attempts(tier).get(where["attempt"])
        if record is None or record.outcome is None:
            if record is not None:
                outcome = {"outcome": KILLED, "snapshot": record.newest_commit, "kind": "snapshot",
                           "exit_code": code}  # fmt: skip
                record = record.with_(state=ENDED, outcome=outcome)
                attempts.replace(tier, record)
            return Ended(code, record)
    except TrainckptError:
        return Ended(code, None)
    own = record.outcome.get("exit_code")
    if record.outcome.get("outcome") in (FINISHED, STOPPED) and type(own) is int:
        return Ended(own, record)
    return Ended(own if type(own) is int and own and code else code, record)


@contextlib.contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    interrupts = 0

    def pass_on(number: int, _: Any) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            _kill_session(process.pid)
            os._exit(130)
        with contextlib.suppress(ProcessLookupError):
            is_user = number == getattr(signal, "SIGUSR1", None)
            process.send_signal(signal.SIGTERM if is_user else number)

    numbers = [getattr(signal, name) for name in PASSED_ON if hasattr(signal, name)]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_session(leader: int) -> None:
    """Kill every process of the session that `leader` began, other process groups included."""
    for pid in _members(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(leader, signal.SIGKILL)


def _members(leader: int) -> list[int]:
    """Descendants of `leader`, which torchrun puts into sessions of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
            pid = int(entry.parent.name)
        except (OSError, ValueError):
            continue
        children.setdefault(int(fields[1]), []).append(pid)
    found, queue = [], [leader]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found
