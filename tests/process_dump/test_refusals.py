"""What is said where processes cannot be dumped or restored; nothing is left of a failure."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from tests.limits import HANG_S
from tests.process_dump.campaign import Run, wait_for
from tests.process_dump.test_dump_choice import asleep
from trainckpt.attempt import heartbeat
from trainckpt.cli import doctor, pause
from trainckpt.cli.main import main
from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format.attempt_record import STOPPED, UNDECIDED, AttemptRecord
from trainckpt.format.dump import DumpName, Image
from trainckpt.launcher.dumper import Dumpable, Dumper, DumpTarget
from trainckpt.launcher.outcome import Outcome
from trainckpt.launcher.processes import ReparentedProcess, orphans_come_here
from trainckpt.launcher.restored_dump import (
    AlreadyResumed,
    RestoredDump,
    StoppedBefore,
    supervise_restored,
)
from trainckpt.launcher.supervisor_record import BY_SUPERVISOR, NamedRun
from trainckpt.launcher.supervisor_signals import Inbox
from trainckpt.process_dump import criu, dump, process_tree, restore
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

NAME, VARIABLE = DumpName(1, 1), "TRAINCKPT_SUPERVISOR"
# Maps a file, and counts on standard output.
PROGRAM = """
import mmap, os, sys, time
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)
for number in range(10**9):
    os.write(1, b"%d\\n" % number)
    time.sleep(0.01)
"""
IDLE_THREADS = """
import threading, time
for _ in range(4):
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
"""

CONNECTED = """
import os, socket, sys, threading
listening = socket.create_server(("127.0.0.1", 0))
here = socket.create_connection(listening.getsockname())
there, _ = listening.accept()
def send_back():
    while text := there.recv(100):
        there.sendall(text)
threading.Thread(target=send_back, daemon=True).start()
old_write = os.write
def through(descriptor, text):
    here.sendall(text)
    old_write(descriptor, here.recv(100))
os.write = through
"""


def pretend(path: Path, version: str, check: str = "exit 0") -> Path:
    """A program that says it is CRIU."""
    path.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo Version: {version} && exit\n{check}\n")
    path.chmod(0o755)
    return path


# ---- what this machine lacks


def test_without_criu_with_an_old_one_or_a_broken_one_doctor_has_the_cure(tmp_path, monkeypatch):
    broken = 'echo "Error (criu/cr-check.c:9): the kernel is too old" >&2; exit 1'
    cases = [
        (tmp_path / "none", "names"),
        (pretend(tmp_path / "old", "3.17.1"), "is CRIU 3.17.1, 4.0 is needed"),
        (pretend(tmp_path / "odd", "none"), "does not run"),
        (pretend(tmp_path / "broken", "4.2", broken), "says the kernel is too old"),
    ]
    for program, why in cases:
        monkeypatch.setenv(criu.VARIABLE, str(program))
        if os.getuid() != 0 and program.name == "broken":
            continue  # what is lacking first is named
        item = doctor.check_dumps()
        assert not item.ok
        assert not item.needed
        assert why in item.value
        assert "trainckpt.process_dump.install" in item.cure


def without_privileges() -> str:
    """Why a process that lacks them cannot dump."""
    text = (
        "import os\nfrom trainckpt.process_dump import criu\nif os.getuid() == 0: os.setuid(65534)"
        "\nprint(criu.examine().why_not)"
    )
    with tempfile.TemporaryDirectory() as place:  # which everybody may enter
        Path(place).chmod(0o755)
        program = pretend(Path(place) / "criu", "4.2.1")
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, criu.VARIABLE: str(program)},
            capture_output=True,
            text=True,
            check=True,
            timeout=HANG_S,
        )
    return done.stdout.strip()


def wait_for_heartbeat(run):
    """A thread writes it; without it `pause` takes the attempt for dead."""
    until = time.monotonic() + 60
    while not heartbeat.path_of(LocalTier(run), 1).exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ("a newer CRIU", "is CRIU 3.17.1, 4.0 is needed"),
        ("privileges", "to dump processes takes CAP_SYS_ADMIN"),
    ],
)
def test_pause_says_what_a_supervisor_lacks(tmp_path, monkeypatch, capsys, lacks, why):
    """The real ones on both sides; nothing is dumped, and the attempt goes on."""
    if lacks == "privileges":
        ability = criu.Ability(why_not=without_privileges())
    else:
        monkeypatch.setenv(criu.VARIABLE, str(pretend(tmp_path / "old", "3.17.1")))
        ability = criu.examine()
    run, codes, said = str(tmp_path / "run"), list[int](), list[str]()
    named = NamedRun(run, ["python"], str(tmp_path), 1)
    named.claim_from("s1~1.1", {"launch": {"kind": "python", "nproc": 1, "by": BY_SUPERVISOR}})
    with contextlib.closing(named), asleep() as process:
        wait_for_heartbeat(run)
        dumping = Dumper(DumpTarget(process, tmp_path, (), named), ability, said.append)
        pause = Thread(target=lambda: codes.append(main(["pause", "--json", "--dump", run])))
        pause.start()
        while pause.is_alive():
            assert not dumping.look([])
            pause.join(0.01)
        assert process.poll() is None
    assert codes == [74]
    assert why in json.loads(capsys.readouterr().out)["error"]
    assert why in said[0]


def test_two_pauses_at_once_are_both_told_of_the_one_dump(criu_here, tmp_path, capsys):
    run, codes = str(tmp_path / "run"), list[int]()
    named = NamedRun(run, ["python"], str(tmp_path), 1)
    named.claim_from("s1~1.1", {"launch": {"kind": "python", "nproc": 1, "by": BY_SUPERVISOR}})
    notices = tmp_path / "run" / "notices"
    argv = ["pause", "--json", "--dump", "--deadline", "60s", run]
    pauses = [Thread(target=lambda: codes.append(main(argv))) for _ in range(2)]
    with contextlib.closing(named), contextlib.ExitStack() as ends:
        counting = Counting(tmp_path, criu_here.program, criu_here.version)
        ends.callback(counting.end)
        wait_for_heartbeat(run)
        launch = DumpTarget(counting.process, counting.supervisor, (counting.log,), named)
        dumping = Dumper(launch, criu_here, lambda _: None)
        for pause in pauses:
            pause.start()
        until = time.monotonic() + HANG_S
        while len(list(notices.glob("*.ask"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert dumping.look([])
        named.end((), Outcome(75, STOPPED, "paused", dump=str(dumping.taken)))
        for pause in pauses:
            pause.join(HANG_S)
    assert codes == [0, 0], capsys.readouterr()


def test_pause_says_why_a_command_was_launched_without_dumps(tmp_path, monkeypatch, capsys):
    """Nobody answers there, and what CRIU says was said to nobody."""
    monkeypatch.setenv(criu.VARIABLE, str(pretend(tmp_path / "old", "3.17.1")))
    monkeypatch.setattr(pause, "ANSWERS_WITHIN_S", 0.2)
    run = str(tmp_path / "run")
    named = NamedRun(run, ["python"], str(tmp_path), 1)
    facts = {"launch": {"kind": "python", "nproc": 1, "by": BY_SUPERVISOR}}
    named.claim_from("s1~1.1", {**facts, "hosts": [socket.gethostname()]})
    with contextlib.closing(named):
        wait_for_heartbeat(run)
        assert main(["pause", "--json", "--dump", run]) == 74
    error = json.loads(capsys.readouterr().out)["error"]
    assert "it was not launched by `trainckpt run` with dumps" in error
    assert "on this host" in error
    assert "is CRIU 3.17.1, 4.0 is needed" in error


def test_criu_is_out_of_reach_of_a_terminals_ctrl_c(tmp_path):
    """It has a session of its own: killed amid a dump it would leave the processes half frozen."""
    say = 'echo "Error (x:1): session $(cut -d" " -f6 /proc/$$/stat)" >&2; exit 1'
    program = pretend(tmp_path / "criu", "4.2", say)
    for said in (criu.dump(program, 1, tmp_path), criu.restore(program, tmp_path, print)):
        assert said.startswith("session ")
        assert int(said.split()[1]) != os.getsid(0)


def test_a_check_that_is_killed_leaves_no_process(tmp_path, monkeypatch):
    """CRIU tests the kernel by processes of its own, which wait for it."""
    leaves = f"sleep 600 >/dev/null 2>&1 & echo $! >{tmp_path}/pid; kill -9 $$"
    monkeypatch.setenv(criu.VARIABLE, str(pretend(tmp_path / "criu", "4.2", leaves)))
    monkeypatch.setattr(criu, "is_privileged", lambda: True)
    assert "check` says" in criu.examine().why_not
    left, until = int((tmp_path / "pid").read_text()), time.monotonic() + HANG_S
    while Path(f"/proc/{left}").exists() and state_of(left) != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_criu_said_before_is_not_said_again(tmp_path):
    says = "echo 'Error (x:1): of old' > restore.log; exit 1"
    program = pretend(tmp_path / "criu", "4.2", f"cd {tmp_path}; {says}")
    assert criu.restore(program, tmp_path, print) == "of old"
    assert "No such file" in criu.restore(tmp_path / "none", tmp_path, print)


def test_criu_holds_the_lock_of_a_dump_as_long_as_it_works(tmp_path):
    """Whoever called it may be gone by then."""
    with (tmp_path / "lock").open("w") as lock:
        say = f'echo "Error (x:1): $(readlink /proc/$$/fd/{lock.fileno()})" >&2; exit 1'
        program = pretend(tmp_path / "criu", "4.2", say)
        assert criu.restore(program, tmp_path, print, [lock.fileno()]) == lock.name


def test_doctor_dumps_and_restores_two_small_processes(criu_here):
    item = doctor.check_dumps()
    assert item.ok, item
    assert "two processes were dumped in" in item.value


# ---- one dump, and everything that may have happened to it before it is restored


class Counting:
    """A small process, its files, and the dump of it."""

    def __init__(
        self, folder: Path, program: Path, version: str, text: str = PROGRAM, bare: bool = True
    ) -> None:
        self.tier = LocalTier(folder / "run")
        self.supervisor, self.mapped = folder / "supervisor", folder / "mapped.so"
        self.log, self.program, self.version = folder / "log", program, version
        self.supervisor.mkdir(mode=0o700)
        self.mapped.write_bytes(os.urandom(8192))
        with self.log.open("ab") as log:
            python = [sys.executable, *(["-I", "-S"] if bare else [])]
            self.process = subprocess.Popen(
                [*python, "-c", text, self.mapped],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**({} if bare else os.environ), VARIABLE: str(self.supervisor)},
            )
        self.restored: ReparentedProcess | None = None

    def numbers(self) -> list[int]:
        return [int(line) for line in self.log.read_bytes().split(b"\n")[:-1]]

    def counts_on(self) -> bool:
        """Waits until it has; that it left none out is asserted."""
        before, until = len(self.numbers()), time.monotonic() + HANG_S
        while len(self.numbers()) < before + 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        found = self.numbers()
        return found == list(range(len(found)))

    def order(self) -> dump.DumpOrder:
        return dump.DumpOrder(
            self.program,
            self.version,
            self.process.pid,
            NAME,
            "run",
            1,
            self.supervisor,
            (self.log,),
            "a test",
        )

    def dump(self):
        with orphans_come_here():
            record = dump.take(self.tier, self.order(), VARIABLE)
            self.process.wait()
            assert dump.await_gone(record) == []
        return record

    def restore(self, record, key: bytes = b"", claim=lambda: {"more": "text"}, say=print) -> None:
        with restore.examined(self.tier, record, key=key) as whole:
            whole.bring_back(2, claim, say=say)
        self.restored = ReparentedProcess(record.root)

    def end(self) -> None:
        for process in (self.process, self.restored):
            if process is not None and process.poll() is None:
                os.kill(process.pid, 9)
                process.wait()


def test_whatever_is_wrong_with_a_dump_is_said_and_once_it_is_right_again_it_is_restored(
    counting, tmp_path, monkeypatch
):
    record = counting.dump()
    images = counting.tier.root / NAME.folder / "images"
    assert images.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in images.iterdir()} == {0o600}

    def refused(why: str, as_=record) -> None:
        with pytest.raises(UnusableSnapshot, match=why):
            counting.restore(as_)
        assert process_tree.taken(record.tasks) == [], "something of the tree is left"

    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(criu.VARIABLE, str(tmp_path / "none"))
        refused("which is no program")
        elsewhere.setenv(criu.VARIABLE, str(pretend(tmp_path / "old", "3.17.1")))
        refused("is CRIU 3.17.1")
    refused("this is", replace(record, host=replace(record.host, kernel="5.0")))
    monkeypatch.setattr(restore, "GONE_WITHIN_S", 1.0)
    refused("other processes have its numbers", replace(record, tasks=(os.getpid(),)))

    inventory = images / "inventory.img"
    whole = inventory.read_bytes()
    inventory.write_bytes(whole[:-4])
    refused(r"inventory\.img has \d+ bytes, not \d+")
    inventory.write_bytes(b"\0" * len(whole))
    refused(r"inventory\.img is damaged")
    # Damaged before its digest was taken: then CRIU itself has to find out.
    (own,) = [image for image in record.images if image.name == "inventory.img"]
    others = tuple(image for image in record.images if image != own)
    zeros = Image(own.name, own.num_bytes, dump.digest_of(inventory))
    refused("could not be restored, says CRIU", replace(record, images=(*others, zeros)))
    inventory.write_bytes(whole)

    library, was = counting.mapped.read_bytes(), counting.mapped.stat()
    counting.mapped.write_bytes(os.urandom(len(library)))
    refused(r"mapped\.so, which was mapped, has changed since")
    counting.mapped.unlink()
    refused(r"mapped\.so, which was mapped, is gone")
    counting.mapped.write_bytes(library[:4096])
    refused(r"says CRIU: .*mapped\.so has bad size", replace(record, mapped=()))
    counting.mapped.write_bytes(library)
    os.utime(counting.mapped, ns=(was.st_atime_ns, was.st_mtime_ns))

    counting.restore(record)
    assert counting.counts_on()
    assert (counting.supervisor / "more").read_text() == "text"


def test_a_dump_that_fails_leaves_the_processes_as_they_were(counting, tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "program", pretend(tmp_path / "criu", "4.2", "exit 1"))
    with pytest.raises(SaveFailed, match="CRIU could not dump"):
        counting.dump()
    assert not (counting.tier.root / NAME.folder).exists()
    assert counting.counts_on()


MANY_FILES = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
files = [open("/dev/null") for _ in range(3000)]
"""


def test_a_tree_with_more_files_open_than_this_process_may_have_is_dumped_and_restored(
    criu_here, tmp_path
):
    """As after `ulimit -n` in the script: CRIU holds as many as the tree."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip("no process may have so many here")
    text = MANY_FILES + PROGRAM
    counting = Counting(tmp_path, criu_here.program, criu_here.version, text)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        assert counting.counts_on()
        record = counting.dump()
        counting.restore(record)
        assert counting.counts_on()
        limits = Path(f"/proc/{record.root}/limits").read_text()
        assert limits.split("Max open files")[1].split()[:2] == [str(hard)] * 2
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(soft, 256)
    finally:
        counting.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_room_is_wanted_where_the_images_will_lie(counting):
    """The folder of dumps may be a link to another file system, or a mount of its own."""
    folder = counting.tier.root / "dumps"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing may be mounted here")
    try:
        with pytest.raises(SaveFailed, match=rf"MB are free at {folder}"):
            counting.dump()
    finally:
        subprocess.run(["umount", folder], check=True)
    assert counting.counts_on()


READS_PROC = """
import os, signal, sys, time
facts = open("/proc/{pid}/stat")
signal.signal(signal.SIGCONT, lambda *_: {then})
"""


@contextlib.contextmanager
def reading_proc(criu_here, folder, then):
    """The small process, with a file in /proc open of a process outside its tree."""
    with subprocess.Popen(["sleep", "600"]) as outside:
        text = READS_PROC.format(pid=outside.pid, then=then) + CONNECTED + PROGRAM
        counting = Counting(folder, criu_here.program, criu_here.version, text)
        try:
            assert counting.counts_on()
            yield counting, outside
        finally:
            counting.end()
            outside.kill()


def test_a_tree_that_reads_proc_of_another_process_is_stopped_again_once_it_is_through(
    criu_here, tmp_path
):
    """CRIU dumps such a file, and cannot restore it once that other process is gone."""
    with reading_proc(criu_here, tmp_path, "facts.close()") as (counting, outside):
        record = counting.dump()
        outside.kill()
        outside.wait()
        counting.restore(record)
        assert counting.counts_on()


def test_a_tree_that_keeps_proc_of_another_process_open_is_not_dumped(criu_here, tmp_path):
    with reading_proc(criu_here, tmp_path, "None") as (counting, outside):
        with pytest.raises(SaveFailed, match=rf"/proc/{outside.pid}/stat is open"):
            counting.dump()
        assert not (counting.tier.root / NAME.folder).exists()
        assert counting.counts_on()


BEATS = """
import os, signal, sys, time
path = "{path}"
os.makedirs(os.path.dirname(path), exist_ok=True)
beat = open(path, "w")
signal.signal(signal.SIGCONT, lambda *_: beat.close())
"""


def test_a_heartbeat_open_at_the_instant_of_the_dump_is_not_in_it(criu_here, tmp_path, monkeypatch):
    """The supervisor removes it at the attempt's end, and the dump would be refused for that."""
    beat = heartbeat.path_of(LocalTier(tmp_path / "run"), NAME.attempt)
    text = BEATS.format(path=beat) + PROGRAM
    counting = Counting(tmp_path, criu_here.program, criu_here.version, text)
    with contextlib.ExitStack() as ends:
        ends.callback(counting.end)
        assert counting.counts_on()
        order = replace(counting.order(), removed=(beat,))
        monkeypatch.setattr(counting, "order", lambda: order)
        record = counting.dump()
        beat.unlink()
        counting.restore(record)
        assert counting.counts_on()


IS_DUE = """
import ctypes, select, signal, struct, sys
libc = ctypes.CDLL(None)
timer = libc.timerfd_create(1, 0)
hourly = struct.pack("qqqq", 3600, 0, 0, 1)  # from a nanosecond on
assert libc.timerfd_settime(timer, 0, hourly, None) == 0
select.select([timer], [], [])
signal.signal(signal.SIGCONT, lambda *_: {then})
"""


@pytest.mark.parametrize("then", ["os.read(timer, 8)", "None"])
def test_a_periodic_timer_that_is_due_and_would_come_back_stopped_is_not_dumped(
    criu_here, tmp_path, then
):
    """The kernel starts its next period only as it is read; CRIU knows nothing of that. A tree that
    reads it as it is let go on is stopped again, and dumped."""
    text = IS_DUE.format(then=then) + PROGRAM
    counting = Counting(tmp_path, criu_here.program, criu_here.version, text)
    with contextlib.ExitStack() as ends:
        ends.callback(counting.end)
        assert counting.counts_on()
        if then == "None":
            with pytest.raises(SaveFailed, match=r"a periodic timer \(timerfd\) has expired"):
                counting.dump()
        else:
            record = counting.dump()
            counting.restore(record)
            info = Path(f"/proc/{record.root}/fdinfo/3").read_text()
            assert "it_interval: (3600, 0)" in info
            assert "it_value: (0, 0)" not in info, "it runs"
        assert counting.counts_on()


READS_REQUEST = """
import os, signal, sys, time
path = os.environ["TRAINCKPT_SUPERVISOR"] + "/rest.json"
os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
request = open(path)
"""


def test_a_file_of_the_supervisor_that_a_process_was_reading_comes_back_as_it_was(
    criu_here, tmp_path
):
    """CRIU opens no file with another mode; the supervisor removes its folder at its end."""
    text = READS_REQUEST + PROGRAM
    counting = Counting(tmp_path, criu_here.program, criu_here.version, text)
    with contextlib.ExitStack() as ends:
        ends.callback(counting.end)
        assert counting.counts_on()
        record = counting.dump()
        shutil.rmtree(counting.supervisor)
        counting.restore(record)
        assert counting.counts_on()


def test_what_the_processes_have_written_is_on_the_disk_before_the_dump_counts(
    counting, monkeypatch
):
    """A file that is shorter after a power cut than it was would refuse the dump."""
    synced, sync, put = set(), os.fsync, counting.tier.replace

    def noted(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        sync(descriptor)

    def replaced(key, data):
        assert {str(counting.log), str(counting.log.parent)} <= synced
        put(key, data)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(counting.tier, "replace", replaced)
    monkeypatch.setattr(counting, "order", partial(replace, counting.order(), logs=()))
    record = counting.dump()
    assert [each.path for each in record.written] == [str(counting.log)]


def test_a_record_that_cannot_be_written_lets_the_stopped_processes_go_on(counting, monkeypatch):
    """CRIU has frozen them by then, and written all images; their connections are in repair mode,
    where they neither send nor receive."""

    def full(*_):
        raise SaveFailed("no space left on device")

    monkeypatch.setattr(counting.tier, "replace", full)
    with pytest.raises(SaveFailed, match="no space left"):
        counting.dump()
    assert not (counting.tier.root / NAME.folder).exists()
    assert counting.counts_on()


# ---- the same, by the command line

SCRIPT = """
import mmap, os, sqlite3, sys, time
place = os.path.dirname(os.path.abspath(sys.argv[0]))
with open(place + "/library.so", "rb") as file:
    library = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
base = sqlite3.connect(place + "/base.db")
base.execute("create table if not exists a (b)")
base.commit()
for number in range(10**6):
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
    if base and os.path.exists(place + "/close"):
        base.close()
        base = None
        sys.stdout.write("closed\\n")
    if os.path.exists(place + "/end"):
        break
    time.sleep(0.05)
"""


def refused(run, why, code=65):
    """A resume that touches nothing, and says what to type."""
    assert run.resume().wait() == code, run.said()
    assert why in run.said().split("\nerror: ")[1], run.said()
    assert "there is no snapshot, and the dump stays as it is" in run.said()
    assert f"trainckpt resume {run.run} --dumps off" in run.said()
    assert run.lines() == []
    run.attempts -= 1  # none was claimed
    assert len(list((Path(run.run) / "attempts").glob("*.json"))) == run.attempts


def test_pause_says_why_not_and_the_command_goes_on_and_a_dump_that_is_refused_stays_of_use(
    criu_here, tmp_path
):
    """A database; between dump and restore a library that is replaced, an image cut short, no
    CRIU, an old one, one that fails, its record damaged. Each is put right again, and the command
    goes on."""
    script, library = tmp_path / "counts.py", tmp_path / "library.so"
    script.write_text(SCRIPT)
    library.write_bytes(b"1" * 8192)
    with Run(tmp_path, script=script, nproc=1) as run:
        run.start().record()
        run.wait_lines(1)  # from then on the database is open
        no = run.pause()
        assert no.returncode == 74, no.stdout + no.stderr
        told = json.loads(no.stdout)
        assert "base.db is a database, open for writing" in told["error"]
        assert "trainckpt doctor" in told["hint"]
        before = len(run.lines())
        run.wait_lines(before + 3)
        assert run.process.poll() is None, "it goes on"

        (tmp_path / "close").touch()
        wait_for(lambda: "closed" in run.lines(), run)
        assert run.pause().returncode == 0
        assert run.wait() == 75

        library.rename(tmp_path / "old.so")
        library.write_bytes(b"2" * 8192)  # as an upgrade does it
        changed = f"{library}, which was mapped, has changed since"
        refused(run, f"dump~1.1 cannot be restored: {changed}")
        (tmp_path / "old.so").rename(library)

        image = Path(run.run) / "dumps" / "dump~1.1" / "images" / "inventory.img"
        whole = image.read_bytes()
        image.write_bytes(whole[:-4])
        refused(run, "inventory.img")
        image.write_bytes(whole)

        record = image.parents[1] / "dump.json"
        whole = record.read_bytes()
        record.write_bytes(whole[:-40])
        refused(run, "dump~1.1 is not restored: ")
        record.write_bytes(whole)

        run.environment[criu.VARIABLE] = str(tmp_path / "none")
        refused(run, "dump~1.1 cannot be restored: TRAINCKPT_CRIU names")
        run.environment[criu.VARIABLE] = str(pretend(tmp_path / "old", "3.17.1"))
        refused(run, f"dump~1.1 cannot be restored: {tmp_path}/old is CRIU 3.17.1, 4.0 is needed")
        fails = 'case "$1" in check) exit 0;; esac; exit 1'
        run.environment[criu.VARIABLE] = str(pretend(tmp_path / "fails", "4.2.1", fails))
        refused(run, "dump~1.1 could not be restored, says CRIU")
        del run.environment[criu.VARIABLE]

        run.resume().record()
        run.wait_lines(3)
        assert run.pause().returncode == 0
        assert run.wait() == 75
        numbers = [int(line) for line in run.all_lines() if line != "closed"]
        assert numbers == list(range(len(numbers)))  # it went on where it was

        (tmp_path / "end").touch()
        assert run.resume("--dumps", "off").wait() == 0
        assert run.lines() == ["0", "closed"]  # from the beginning, as was asked for


def test_an_attempt_that_begins_while_images_are_read_is_noticed_before_a_file_is_cut_back(
    criu_here, counting, tmp_path, monkeypatch
):
    record, real = counting.dump(), restore.examined
    attempt_history.found_run(counting.tier)
    attempt_history.claim(counting.tier, partial(AttemptRecord, parent=None))
    with counting.log.open("ab") as log:
        log.write(b"the other attempt's")
    before = counting.log.read_bytes()

    @contextlib.contextmanager
    def examined(*arguments, **more):
        with real(*arguments, **more) as whole:
            attempt_history.claim(counting.tier, partial(AttemptRecord, parent=None))
            yield whole

    monkeypatch.setattr(restore, "examined", examined)
    named = NamedRun(str(counting.tier.root), ["python"], str(tmp_path), 1)
    dumped = RestoredDump(counting.tier, record, named, {}, Dumpable(criu_here, print))
    with Inbox() as inbox, pytest.raises(AlreadyResumed, match="attempt 2 began meanwhile"):
        supervise_restored(dumped, inbox)
    assert counting.log.read_bytes() == before
    assert attempt_history.newest(counting.tier) == 2


def test_what_somebody_else_has_brought_back_is_not_ended(counting, monkeypatch):
    """Of a restore that failed only what is below this process is."""
    record = counting.dump()
    marked = f"{VARIABLE}={counting.supervisor} sleep 600 >/dev/null 2>&1 & echo $!"
    said = subprocess.run(["sh", "-c", marked], capture_output=True, check=True).stdout
    monkeypatch.setattr(dump, "GONE_WITHIN_S", 0.1)
    try:
        restore.kill(replace(record, tasks=(int(said),)))
        assert process_tree.taken([int(said)]) == [int(said)]
        assert process_tree.marked(VARIABLE, str(counting.supervisor)) == [int(said)]
    finally:
        os.kill(int(said), 9)


def test_what_a_killed_criu_leaves_is_ended_before_it_has_its_environment(
    counting, tmp_path, monkeypatch
):
    """It would stand beside the run that goes on from a snapshot."""
    record, as_criu = counting.dump(), shutil.copy(shutil.which("sleep"), tmp_path / criu.NAME)
    monkeypatch.setattr(dump, "GONE_WITHIN_S", 0.1)
    with contextlib.ExitStack() as stack:
        words = [[as_criu, "600"], [as_criu, "601"], ["sleep", "602"]]
        begun = [stack.enter_context(subprocess.Popen(each, env={})) for each in words]
        restore.kill(replace(record, tasks=tuple(each.pid for each in begun)))
        assert [heartbeat.is_alive(each.pid) for each in begun] == [False, False, True]
        begun[-1].kill()


class Slower(NamedRun):
    """Somebody else claims an attempt first, and does not ask for the dump."""

    def claim_from(self, parent, facts):
        attempt_history.claim(self.tier, partial(AttemptRecord, parent=None))
        return super().claim_from(parent, facts)


def test_a_signal_before_the_claim_ends_the_resume_and_the_dump_stays_of_use(
    criu_here, counting, tmp_path, monkeypatch
):
    """Before CRIU begins, and while it restores. After the claim it could end the processes, and
    with them what is in no other dump."""
    record = counting.dump()
    attempt_history.found_run(counting.tier)
    attempt_history.claim(counting.tier, partial(AttemptRecord, parent=None))
    script = f"[ $1 = restore ] && kill -TERM {os.getpid()}; exec {criu_here.program} $*"
    signalling = pretend(tmp_path / "criu", criu_here.version, script)

    def stopped(program, *signals):
        monkeypatch.setenv(criu.VARIABLE, str(program))
        named = NamedRun(str(counting.tier.root), ["python"], str(tmp_path), 1)
        dumped = RestoredDump(counting.tier, record, named, {}, Dumpable(criu_here, print))
        why = r"SIG[A-Z]+: dump~1\.1 is not restored, and stays as it is"
        with Inbox() as inbox:
            for number in signals:
                os.kill(os.getpid(), number)
            with pytest.raises(StoppedBefore, match=why):
                supervise_restored(dumped, inbox)
        assert process_tree.taken(record.tasks) == []
        assert attempt_history.newest(counting.tier) == record.name.attempt

    stopped(criu_here.program, signal.SIGINT)
    stopped(signalling)
    monkeypatch.delenv(criu.VARIABLE)
    counting.restore(record)
    assert counting.counts_on()


def test_two_who_restore_one_dump_do_not_both(criu_here, counting, tmp_path):
    """Whether the other is at it, has begun an attempt, or begins one meanwhile."""
    record = counting.dump()
    attempt_history.found_run(counting.tier)
    attempt_history.claim(counting.tier, partial(AttemptRecord, parent=None))
    assert attempt_history.newest(counting.tier) == record.name.attempt

    def refused(why, kind=NamedRun):
        named = kind(str(counting.tier.root), ["python"], str(tmp_path), 1)
        dumped = RestoredDump(counting.tier, record, named, {}, Dumpable(criu_here, print))
        with Inbox() as inbox, pytest.raises(AlreadyResumed, match=why):
            supervise_restored(dumped, inbox)
        assert process_tree.taken(record.tasks) == []

    folder = os.open(counting.tier.root / NAME.folder, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    refused(r"another process is restoring dump~1\.1")
    os.close(folder)
    refused("attempt 2 began meanwhile", Slower)
    found = attempt_history.read_attempts(counting.tier)
    assert found[3].outcome["outcome"] == "failed"
    assert found[3].parent == UNDECIDED, "what attempt 2 commits stays on the ancestry"
    refused("attempt 3 began meanwhile")
    assert attempt_history.newest(counting.tier) == 3
    counting.restore(record)
    assert counting.counts_on()
