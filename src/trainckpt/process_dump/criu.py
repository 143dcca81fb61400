"""CRIU through its command line: which one, what it can do here, and its flags.

By subprocess: no protocol library, the same program everywhere, its log on disk. A CRIU that was
told to dump is never killed: the tree would be left half frozen. Whoever has a deadline judges
before whether the time suffices, and a session of its own keeps a terminal's Ctrl-C from it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.process_dump import gate
from trainckpt.process_dump.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

VARIABLE = "TRAINCKPT_CRIU"
INSTALLED = Path(sys.prefix) / "lib" / "trainckpt-criu"
LEAST = (4, 0)
INSTALL = f"{Path(sys.executable).name} -m trainckpt.process_dump.install"
ASK_WITHIN_S = 60.0
CAP_SYS_ADMIN = 21
# Of dump and restore alike:
#   tcp-established  ranks and store are connected to each other, inside the tree
#   network-lock     peers are all frozen with the tree, so nobody has to be kept from writing;
#                    every other way wants iptables or nftables
#   ghost-limit      loader workers hand over batches in unlinked shared memory; 1 MB would be the
#                    default. The number must fit 32 bits
#   manage-cgroups   the tree stays in whichever cgroup the restoring process is in
#   file-locks       held within the tree
FLAGS = (
    "--tcp-established", "--ext-unix-sk", "--file-locks", "--network-lock", "skip",
    "--ghost-limit", "3G", "--manage-cgroups=ignore", "--shell-job",
)  # fmt: skip
COLLECT_WITHIN_S = 60
_VERSION = re.compile(r"^Version: (\d+)\.(\d+)(?:\.(\d+))?", re.MULTILINE)
_ERROR = re.compile(r"Error \([^)]*\): (.*)")
# A process's number, or a thread's (17: EEXIST).
_TAKEN = re.compile(
    r"Can't fork for \d+: File exists|Pid \d+ do(?:es)? not match expected"
    r"|Unable to create a thread: -17\b|Thread pid mismatch"
)
_IN_USE = "Can't bind inet socket"
MOST_ERRORS, MOST_CHARACTERS = 3, 300


@dataclass(frozen=True)
class Ability:
    """Whether this process can dump and restore here.

    Attributes:
        program: CRIU, or None where there is none.
        version: Of it, "4.2.1"; "" where that could not be asked.
        why_not: Why no process can be dumped, or "".
        cure: What to type then.
    """

    program: Path | None = None
    version: str = ""
    why_not: str = ""
    cure: str = ""


def find() -> Path | None:
    """The CRIU to use: the one that is named, the one that `install` made, the system's."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if os.access(named, os.X_OK) else None
    own = INSTALLED / "usr/sbin/criu"
    if os.access(own, os.X_OK):
        return own
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    found = shutil.which("criu", path=search)
    return None if found is None else Path(found)


def version_of(program: Path) -> tuple[int, ...] | None:
    """Its version, (4, 2, 1); None where it does not run."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=ASK_WITHIN_S,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(done.stdout)
    return tuple(int(part or 0) for part in found.groups()) if found else None


def examine() -> Ability:
    """What can be done here, tried by CRIU itself; 0.1 s."""
    if not sys.platform.startswith("linux"):
        return Ability(why_not="processes can be dumped on Linux only", cure="use snapshots")
    program = find()
    if program is None:
        named = os.environ.get(VARIABLE)
        where = f"{VARIABLE} names {named}, which is no program" if named else "there is no CRIU"
        return Ability(why_not=where, cure=INSTALL)
    version = version_of(program)
    if version is None:
        return Ability(program, "", f"{program} does not run", INSTALL)
    text = ".".join(map(str, version))
    if version < LEAST:
        least = ".".join(map(str, LEAST))
        return Ability(program, text, f"{program} is CRIU {text}, {least} is needed", INSTALL)
    if not is_privileged():
        return Ability(program, text, "to dump processes takes CAP_SYS_ADMIN",
                       "run `trainckpt run` as root")  # fmt: skip
    done = _ask(program, "check")
    if done.returncode != 0:
        return Ability(program, text, f"`{program} check` says {said(done.stderr + done.stdout)}",
                       f"{INSTALL}, or a container that may use ptrace and clone3")  # fmt: skip
    why = gate.why_not()
    return Ability(program, text, why, "vm.memfd_noexec below 2, and /bin/sh" if why else "")


def is_privileged() -> bool:
    """Whether this process has CAP_SYS_ADMIN; without it shared memory cannot be dumped."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines()
                      if line.startswith("CapEff:")), "0")  # fmt: skip
    return bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


def dump(program: Path, root: int, images: Path) -> str:
    """Dump the tree under process `root` into `images`; it stays, stopped.

    Returns:
        What CRIU says against it; then the tree goes on as before. "" once it is done.
    """
    options = ["--tree", str(root), "--leave-stopped", "--timeout", str(COLLECT_WITHIN_S)]
    return _tell(program, "dump", images, options)


def restore(
    program: Path, images: Path, may_go: Callable[[], object], held: Iterable[int] = ()
) -> str:
    """Bring the tree back; its root becomes a child of this process.

    Args:
        program, images: CRIU, and what it wrote.
        may_go: Is called once all of the tree is there, before any of it goes on. If it raises, so
            that CRIU ends the tree, the error comes out.
        held: Descriptors that CRIU holds too, as long as it works.

    Returns:
        What CRIU says against it; then it has ended the tree. "" once that runs.
    """
    with Gate() as asks:
        options = ["--restore-detached", "--restore-sibling", "--action-script", asks.script]
        through = partial(_through, asks, may_go, tuple(held))
        return _tell(program, "restore", images, options, through)


def is_number_taken(said: str) -> bool:
    """Whether a restore ended because another process or thread has one of the tree's numbers."""
    return bool(_TAKEN.search(said))


def is_port_taken(said: str) -> bool:
    """Whether a restore ended because another socket has a port of the tree's."""
    return _IN_USE in said and os.strerror(errno.EADDRINUSE) in said


def said(log: str) -> str:
    """The first errors in a log of CRIU's, without its source lines; what is taken before all."""
    errors = list(dict.fromkeys(_ERROR.findall(log))) or log.strip().splitlines()[-1:]
    errors.sort(key=lambda error: not (is_number_taken(error) or is_port_taken(error)))
    return "; ".join(errors[:MOST_ERRORS])[:MOST_CHARACTERS] or "nothing"


def _tell(
    program: Path,
    verb: str,
    images: Path,
    options: list[str],
    run: Callable[[list[str | Path]], subprocess.CompletedProcess[str]] | None = None,
) -> str:
    log = images / f"{verb}.log"
    with contextlib.suppress(OSError):
        log.unlink()  # what was said before, of a restore that failed
    # GPUs are none of CRIU's business here, so it finds no plugins: the folder holds none.
    common = ["-D", str(images), "-o", log.name, "-v2", "--libdir", str(images), *FLAGS]
    arguments = [verb, *options, *common]
    done = run([program, *arguments]) if run else _ask(program, *arguments, limit_s=None)
    if done.returncode == 0:
        return ""
    try:
        return said(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return said(done.stderr)


def _through(
    asks: Gate, may_go: Callable[[], object], held: tuple[int, ...], command: list[str | Path]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, pass_fds=(*asks.theirs, *held), stdin=subprocess.DEVNULL, stdout=errors,
                stderr=errors, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        try:
            asked = asks.attend(process, may_go)
        finally:
            process.wait()
        if process.returncode == 0 and not asked:
            may_go()  # it knows of no scripts, and the tree runs
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, "", errors.read())


def _ask(
    program: Path, *arguments: str, limit_s: float | None = ASK_WITHIN_S
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=limit_s, check=False, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess([str(program)], 1, "", str(error))
