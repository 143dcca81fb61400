"""CRIU through its command line: the program, its abilities here, and its flags.

A subprocess needs no protocol library, works with any CRIU, and leaves its log on disk. A CRIU
running a dump is never killed: the tree would be left half frozen. A caller with a deadline
estimates the time first. CRIU runs in its own session, safe from a terminal's Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

VARIABLE = "TRAINCKPT_CRIU"
NAME = "criu"  # of the program's file
INSTALLED = Path(sys.prefix) / "lib" / "trainckpt-criu"
LEAST = (4, 0)
INSTALL = f"{Path(sys.executable).name} -m trainckpt.process_dump.install"
ASK_WITHIN_S = 60.0
CAP_SYS_ADMIN = 21
# For dump and restore alike:
#   tcp-established  ranks and store are connected to each other, inside the tree
#   network-lock     all peers are frozen with the tree, so no packets need blocking; every other
#                    method needs iptables or nftables
#   ghost-limit      loader workers pass batches through unlinked shared memory; the default is
#                    1 MB. The number must fit 32 bits
#   manage-cgroups   the tree joins the restoring process's cgroup
#   file-locks       locks between processes of the tree
FLAGS = (
    "--tcp-established",
    "--ext-unix-sk",
    "--file-locks",
    "--network-lock",
    "skip",
    "--ghost-limit",
    "3G",
    "--manage-cgroups=ignore",
    "--shell-job",
)
COLLECT_WITHIN_S = 60
_VERSION = re.compile(r"^Version: (\d+)\.(\d+)(?:\.(\d+))?", re.MULTILINE)
_ERROR = re.compile(r"Error \([^)]*\): (.*)")
# Messages about a process id in use, or a thread id (17: EEXIST).
_TAKEN = re.compile(
    r"Can't fork for \d+: File exists|Pid \d+ do(?:es)? not match expected"
    r"|Unable to create a thread: -17\b|Thread pid mismatch"
)
_IN_USE = "Can't bind inet socket"
_USUAL = "rlimit: Can't setup RLIMIT_NOFILE for self"  # without CAP_SYS_RESOURCE
MOST_ERRORS, MOST_CHARACTERS = 3, 300


@dataclass(frozen=True)
class Ability:
    """This process's ability to dump and restore here."""

    program: Path | None = None  # CRIU's path, or None without one
    version: str = ""  # CRIU's version, "4.2.1"; "" if unknown
    why_not: str = ""  # reason against any dump, or ""
    cure: str = ""  # command or setting to cure it


def find() -> Path | None:
    """Return CRIU's path: from the environment variable, from `install`, or the system's."""
    configured = os.environ.get(VARIABLE)
    if configured is not None:
        return Path(configured) if os.access(configured, os.X_OK) else None
    installed = INSTALLED / "usr/sbin/criu"
    if os.access(installed, os.X_OK):
        return installed
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    on_path = shutil.which("criu", path=search)
    return None if on_path is None else Path(on_path)


def version_of(program: Path) -> tuple[int, ...] | None:
    """Return CRIU's version, (4, 2, 1); None if it does not run."""
    try:
        completed = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=ASK_WITHIN_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(completed.stdout)
    return tuple(int(part or 0) for part in match.groups()) if match else None


def examine() -> Ability:
    """Return the ability to dump here, as tested by CRIU itself; takes 0.1 s."""
    if not sys.platform.startswith("linux"):
        return Ability(why_not="processes can be dumped on Linux only", cure="use snapshots")
    program = find()
    if program is None:
        named = os.environ.get(VARIABLE)
        reason = f"{VARIABLE} names {named}, which is no program" if named else "there is no CRIU"
        return Ability(why_not=reason, cure=INSTALL)
    version = version_of(program)
    if version is None:
        return Ability(program, "", f"{program} does not run", INSTALL)
    text, reason, cure = ".".join(map(str, version)), "", ""
    if version < LEAST:
        least = ".".join(map(str, LEAST))
        reason, cure = f"{program} is CRIU {text}, {least} is needed", INSTALL
    elif not is_privileged():
        reason, cure = "to dump processes takes CAP_SYS_ADMIN", "run `trainckpt run` as root"
    elif (check := _ask(program, "check")).returncode != 0:
        reason = f"`{program} check` says {said(check.stderr + check.stdout)}"
        cure = f"{INSTALL}, or a container that may use ptrace and clone3"
    elif reason := why_no_gate():
        cure = "vm.memfd_noexec below 2, and /bin/sh"
    return Ability(program, text, reason, cure)


def is_privileged() -> bool:
    """Return True if this process has CAP_SYS_ADMIN, needed to dump shared memory."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    effective = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0"
    )
    return bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


def dump(program: Path, root: int, images: Path, held: Iterable[int] = ()) -> str:
    """Dump the tree under process `root` into `images`; the tree stays stopped.

    Args:
        program, root, images: CRIU, the root's process id, and the folder for the images.
        held: Descriptors for CRIU to keep open while it works.

    Returns:
        "" on success, else CRIU's errors; the tree then runs on.
    """
    options = ["--tree", str(root), "--leave-stopped", "--timeout", str(COLLECT_WITHIN_S)]
    run = partial(_run, limit_s=None, held=tuple(held))
    return _tell(program, "dump", images, options, run)


def restore(
    program: Path, images: Path, may_go: Callable[[], object], held: Iterable[int] = ()
) -> str:
    """Restore the tree; its root becomes a child of this process.

    Args:
        program, images: CRIU, and the folder of its images.
        may_go: Called once the whole tree exists, before any of it runs. If it raises, CRIU ends
            the tree, and the error is raised here.
        held: Descriptors for CRIU to keep open while it works.

    Returns:
        "" once the tree runs, else CRIU's errors; CRIU has then ended the tree.
    """
    with RestoreGate() as gate:
        options = ["--restore-detached", "--restore-sibling", "--action-script", gate.script]
        run_gated = partial(_through, gate, may_go, tuple(held))
        return _tell(program, "restore", images, options, run_gated)


def is_number_taken(log: str) -> bool:
    """Return True if a restore failed because a process or thread id of the tree is in use."""
    return bool(_TAKEN.search(log))


def is_port_taken(log: str) -> bool:
    """Return True if a restore failed because a port of the tree is in use."""
    return _IN_USE in log and os.strerror(errno.EADDRINUSE) in log


def said(log: str) -> str:
    """Return the first errors in CRIU's log, without source lines.

    Ids or ports in use come first, and what CRIU says in every container last.
    """
    errors = list(dict.fromkeys(_ERROR.findall(log))) or log.strip().splitlines()[-1:]
    errors.sort(key=_importance)
    return "; ".join(errors[:MOST_ERRORS])[:MOST_CHARACTERS] or "nothing"


def _importance(error: str) -> int:
    if is_number_taken(error) or is_port_taken(error):
        return 0
    return 2 if error.startswith(_USUAL) else 1


def _tell(
    program: Path,
    verb: str,
    images: Path,
    options: list[str],
    run: Callable[[list[str | Path]], subprocess.CompletedProcess[str]],
) -> str:
    log = images / f"{verb}.log"
    with contextlib.suppress(OSError):
        log.unlink()  # from an earlier failed restore
    # No plugins: `gpu_state` handles GPUs, so CRIU gets a library folder without any.
    common = ["-D", str(images), "-o", log.name, "-v2", "--libdir", str(images), *FLAGS]
    completed = run([program, verb, *options, *common])
    if completed.returncode == 0:
        return ""
    text = completed.stderr
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
    if completed.returncode < 0:  # its log ends anywhere
        return f"it was ended by {signal.Signals(-completed.returncode).name}"
    return said(text)


def _through(
    asks: RestoreGate,
    may_go: Callable[[], object],
    held: tuple[int, ...],
    command: list[str | Path],
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            with _most_descriptors():
                process = subprocess.Popen(
                    command,
                    pass_fds=(*asks.theirs, *held),
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,
                )
        except OSError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        try:
            was_asked = asks.attend(process, may_go)
        finally:
            process.wait()
        if process.returncode == 0 and not was_asked:
            may_go()  # this CRIU ran no script, and the tree runs already
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, "", errors.read())


def _ask(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run([program, *arguments], limit_s=ASK_WITHIN_S)


def _run(
    command: list[str | Path], *, limit_s: float | None, held: tuple[int, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run CRIU in a session of its own, and end all that a failed one leaves in it."""
    try:
        with (
            _most_descriptors(),
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=held,
                start_new_session=True,
            ) as process,
        ):
            try:
                out, err = process.communicate(timeout=limit_s)
            finally:
                if process.returncode != 0:  # its children test the kernel, stopped or traced
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, out, err)
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


@contextlib.contextmanager
def _most_descriptors() -> Iterator[None]:
    """Raise the soft limit of descriptors in the block; a program started there inherits it.

    CRIU holds as many as a process of the tree, whose own limit may be higher. It raises its limit
    itself only with CAP_SYS_RESOURCE. Restored processes get their old limits.
    """
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- the gate: a restored tree waits until this process lets it run
#
# CRIU runs a script once every process of the tree exists, each stopped where it was dumped. If the
# script fails, CRIU ends them all. The script asks this process through a pipe and waits for the
# answer on another pipe. If this process dies, the answer is no.
#
# The script is a file in memory, so no folder with executable files is needed and nothing remains.


LOOK_EVERY_S = 1.0
TRY_WITHIN_S = 10.0
_CLOSED_ON_EXEC, _MAY_RUN = 0x1, 0x10  # MFD_CLOEXEC; MFD_EXEC, since Linux 6.3
# CRIU inherits the pipes but closes them in the script, so the script opens them through /proc.
_SCRIPT = """#!/bin/sh
test "$CRTOOLS_SCRIPT_ACTION" = post-restore || exit 0
echo >/proc/$PPID/fd/{asked} || exit 1
read -r answer </proc/$PPID/fd/{answer}
test "$answer" = go
"""


class RestoreGate:
    """Gate for one call of CRIU, as a context.

    Attributes:
        theirs: Descriptors for CRIU to inherit.
        script: Path for `--action-script`; valid while this process lives.
    """

    def __enter__(self) -> RestoreGate:
        """Make pipes and script; raise OSError if the system cannot."""
        with contextlib.ExitStack() as stack:
            self._open = set[int]()
            stack.callback(lambda: self._close(*self._open))
            self._asked, asked_end = self._opened(*os.pipe())
            answer, self._answer = self._opened(*os.pipe())
            self.theirs = (asked_end, answer)
            text = _SCRIPT.format(asked=asked_end, answer=answer)
            (script,) = self._opened(_program("trainckpt-gate", text.encode()))
            self.script = f"/proc/{os.getpid()}/fd/{script}"
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def attend(self, process: subprocess.Popen[bytes], may_go: Callable[[], object]) -> bool:
        """Wait until CRIU asks, and let the tree run unless `may_go` raises.

        Returns:
            True if CRIU asked; False if it ended before.
        """
        self._close(*self.theirs)
        try:
            is_asked = self._is_asked(process)
            if is_asked:
                may_go()
                with contextlib.suppress(BrokenPipeError):  # CRIU has ended
                    os.write(self._answer, b"go\n")
        finally:
            self._close(self._answer)
        return is_asked

    def _is_asked(self, process: subprocess.Popen[bytes]) -> bool:
        poller = select.poll()
        poller.register(self._asked, select.POLLIN)
        while not poller.poll(1000 * LOOK_EVERY_S):
            # Partly restored processes may have the other end open, and outlive CRIU.
            if process.poll() is not None:
                return False
        return bool(os.read(self._asked, 1))

    def _opened(self, *descriptors: int) -> tuple[int, ...]:
        self._open.update(descriptors)
        return descriptors

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)


def why_no_gate() -> str:
    """Return the reason against a gate here, or "", after a trial."""
    try:
        with RestoreGate() as gate:
            completed = subprocess.run(
                [gate.script], capture_output=True, text=True, timeout=TRY_WITHIN_S, check=False
            )
    except (OSError, subprocess.SubprocessError) as error:
        return f"CRIU could ask nothing: {error}"
    return f"CRIU could ask nothing: {completed.stderr.strip()}" if completed.returncode else ""


def _program(name: str, text: bytes) -> int:
    """Return a read-only descriptor of a program in memory; executing it requires no writers."""
    try:
        descriptor = os.memfd_create(name, _CLOSED_ON_EXEC | _MAY_RUN)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create(name, _CLOSED_ON_EXEC)
    try:
        os.write(descriptor, text)
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
