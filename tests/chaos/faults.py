"""The catalogue of faults: what each needs, how it happens and is over, and what it may lead to.

    ends     exit codes that it explains, besides 0 and 75
    permits  what may happen to the run besides: that an older snapshot is used, or a start refused

Python waits for ever for a thread that ends for want of memory before its first instruction, so a
rank under a limit of memory may hang, if its log names such a thread. So may one whose loader
worker finds no thread to hand a batch over.

Where survivors save, a death may also lead to the same data, if the run says so.

A fault that kills is over at once. Any other lasts for a while, at most until its attempt ends, and
no longer than `MOST_S` where it would never end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos import disk, rooms
from tests.chaos.rooms import DUMPS, RUN, S3, TIER
from tests.faults import cgroup
from tests.faults.s3_proxy import DROP, HOLD, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from tests.chaos.drive import Play
    from tests.chaos.rooms import Room

OLDER, REFUSED, SAME_DATA, HANGS = "older", "refused", "same data", "hangs"
DEATH = frozenset({1, 71, 74, -6, -9, -15, 134, 137, 143})  # of a rank, and what follows from it
STOP = frozenset({-15, -10, 143, 138})  # by a signal before the run began
STORAGE = frozenset({65, 69, 71, 74})
STARVED = DEATH | STORAGE | {-11, 139}
NO_MEMORY = STARVED | {127}  # of the C library, without memory for a thread's data

# Numbers of processes are no names: another chaos may have the same, in a namespace of its own.
PROCESSES_GROUP = Path("/sys/fs/cgroup/pids") / f"trainckpt-chaos-{secrets.token_hex(4)}"
LISTENED_S = 1.5  # within that every rank has looked for notices
MOST_S = 15.0  # longer than `survivors` waits for a rank, and than a store may be silent


@dataclass(frozen=True)
class Fault:
    """A row of the catalogue."""

    needs: Callable[[Room], bool]
    happen: Callable[..., str]
    how: tuple[Any, ...] = ()
    end: Callable[[Play], None] | None = None
    ends: AbstractSet[int] = frozenset()
    permits: AbstractSet[str] = frozenset()

    @property
    def halts(self) -> bool:
        """Whether somebody waits for its end, or tries again for longer than a case may take."""
        return self.end in (wake, go_on_store, new_store, open_doors)

    def begin(self, play: Play) -> str:
        """Let it happen; return where it hit, or "" if there was nothing to hit."""
        return self.happen(play, *self.how)


def anywhere(_: Room) -> bool:
    return True


def on_disk(room: Room) -> bool:
    return room.place in rooms.ON_DISK


def in_store(room: Room) -> bool:
    return room.place in (S3, TIER)


def on_no_disk(room: Room) -> bool:
    return room.place in (rooms.LOCAL, TIER)


def in_folder(room: Room) -> bool:
    return room.place != S3


def on_hosts(room: Room) -> bool:
    return room.hosts > 1


def has_workers(room: Room) -> bool:
    return room.workers > 0


def has_memory(room: Room) -> bool:
    return room.place != rooms.POOR


def has_tier(room: Room) -> bool:
    return room.place == TIER


def supervised(room: Room) -> bool:
    return room.launcher in (RUN, DUMPS)


def dumping(room: Room) -> bool:
    return room.launcher == DUMPS


# How much likelier a fault is drawn in the few rooms where it is possible.
WEIGHTS = {
    supervised: 9,
    dumping: 9,
    has_tier: 12,
    in_store: 5,
    on_no_disk: 2,
    on_hosts: 2,
    has_workers: 2,
    on_disk: 1.5,
}


# ---- processes


def one_rank(play: Play, *numbers: int) -> str:
    """Signals to one rank, one after the other."""
    ranks = play.attempt.rank_pids()
    if not ranks:
        return ""
    rank = play.pick(sorted(ranks))
    for number in numbers:
        play.attempt.signal([ranks[rank]], number)
        if len(numbers) > 1:
            time.sleep(0.3 * play.pick_share())
    return f"rank {rank}"


def all_ranks(play: Play, number: int) -> str:
    pids = list(play.attempt.rank_pids().values())
    play.attempt.signal(pids, number)
    return f"{len(pids)} ranks" if pids else ""


def everybody(play: Play) -> str:
    play.attempt.kill()
    return "everybody"


def reboot(play: Play) -> str:
    """All hosts, with what they have in memory."""
    play.attempt.kill()
    play.stage.forget(play.room)
    return "everybody, and memory"


def one_child(play: Play, number: int) -> str:
    """A loader worker of some rank, or its writer."""
    children = [pid for r in play.attempt.rank_pids() for pid in play.attempt.children(r)]
    if not children:
        return ""
    suspend_or_end(play, play.pick(children), number)
    return "a child"


def hold_rank(play: Play) -> str:
    ranks = play.attempt.rank_pids()
    if not ranks:
        return ""
    rank = play.pick(sorted(ranks))
    suspend_or_end(play, ranks[rank], signal.SIGSTOP)
    return f"rank {rank}"


def suspend_or_end(play: Play, pid: int, number: int) -> None:
    """Send the signal; `wake` continues all processes that are suspended by then."""
    if number == signal.SIGSTOP:
        play.held.append(pid)
    play.attempt.signal([pid], number)


def wake(play: Play) -> None:
    play.attempt.signal(play.held, signal.SIGCONT)
    play.held = []


def launcher(play: Play, number: int) -> str:
    suspend_or_end(play, play.attempt.launcher_pid(), number)
    return "trainckpt run"


def agent(play: Play) -> str:
    pid = play.attempt.agent_pid()
    if pid is None:
        return ""
    play.attempt.signal([pid], signal.SIGKILL)
    return "torchrun"


# ---- process dumps


def pause(play: Play) -> str:
    """The user asks for a dump; by that the attempt ends, if nothing else ends it."""
    if not play.has_begun and not play.dumps():
        return ""
    play.ask("pause", "--dump", play.places.name)
    until_s = time.monotonic() + MOST_S
    while play.is_asking() and "will stop at" not in play.asked() and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(LISTENED_S)
    play.attempt.gate.touch()  # or ranks would never come to their next boundary
    return "trainckpt pause"


def criu(play: Play, number: int) -> str:
    """CRIU, once it works on a dump or on a restore."""
    until_s = time.monotonic() + 10
    while not (pids := play.attempt.criu_pids()) and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(0.3 * play.pick_share())
    found = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for pid in found:
        suspend_or_end(play, pid, number)
    return f"{len(found)} processes" if found else ""


def rot_in_dump(play: Play) -> str:
    return flip_one_of(play, play.places.run.glob("dumps/*/images/*"))


def lose_image(play: Play) -> str:
    images = sorted(play.places.run.glob("dumps/*/images/*"))
    if not images:
        return ""
    play.attempt.kill()
    image = play.pick(images)
    image.unlink(missing_ok=True)
    return f"{image.parent.parent.name}/{image.name}"


def full_for_dumps(play: Play) -> str:
    """Dumps would lie on a disk of their own, which is too small."""
    folder = play.places.run / "dumps"
    if not (play.places.run / "run.json").exists():
        return ""
    folder.mkdir(mode=0o700, exist_ok=True)
    size_mb = 1 + int(play.pick_share() * 300)
    options = f"size={size_mb}m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    return f"{size_mb} MB"


def room_for_dumps(play: Play) -> None:
    subprocess.run(["umount", "-l", play.places.run / "dumps"], check=True)


# ---- hosts


def lose_host(play: Play) -> str:
    number = play.pick(range(play.room.hosts))
    play.lose_host(number)
    return f"host {number}"


def copy_alive(folder: Path, to: Path, **how: Any) -> None:
    """Copy a folder from which files may vanish meanwhile; then once more from the beginning."""
    for tries_left in reversed(range(20)):
        shutil.rmtree(to, ignore_errors=True)
        try:
            shutil.copytree(folder, to, **how)
            return
        except shutil.Error:
            if not tries_left:
                raise


def old_host(play: Play) -> str:
    """The host comes back with the memory that it had a while ago."""
    number = play.pick(range(play.room.hosts))
    memory, kept = play.stage.memory_of(play.room, number), play.places.folder / "old-memory"
    copy_alive(memory, kept, ignore=shutil.ignore_patterns("hosts", "nsswitch.conf"))
    time.sleep(0.3)
    play.lose_host(number)
    shutil.copytree(kept, play.stage.memory_of(play.room, number), dirs_exist_ok=True)
    return f"host {number}"


def old_directory(play: Play) -> str:
    """The run directory is an older copy of itself; nothing runs meanwhile."""
    kept = play.places.folder / "old-run"
    if not play.places.run.is_dir():
        return ""
    copy_alive(play.places.run, kept, ignore_dangling_symlinks=True)
    time.sleep(0.3)
    play.attempt.kill()
    shutil.rmtree(play.places.run)
    shutil.copytree(kept, play.places.run)
    return "the run directory"


# ---- the disk


def trouble(play: Play, number: int, kinds: tuple[str, ...]) -> str:
    first, once = 1 + int(play.pick_share() * 12), play.flip()
    play.stage.disk.set(
        {"kinds": kinds, "errno": number, "first": first, "times": 1 if once else None}
    )
    return f"call {first}" + ("" if once else " and all later ones")


def slow_disk(play: Play, delay_s: float, times: int | None = None) -> str:
    play.stage.disk.set({"kinds": disk.ALL, "delay_s": delay_s, "first": 1, "times": times})
    return f"{delay_s} s a call"


def healthy(play: Play) -> None:
    play.stage.disk.set(None)


def vanish(play: Play) -> str:
    """Nothing is where the run directory was; a start there begins another run."""
    if not play.places.run.is_dir() or not play.has_begun:
        return ""
    play.places.run.rename(play.places.folder / "away")
    return "the run directory"


def appear(play: Play) -> None:
    shutil.rmtree(play.places.run, ignore_errors=True)
    (play.places.folder / "away").rename(play.places.run)


def in_the_way(play: Play) -> str:
    """Files of somebody else where the next snapshots would be."""
    known = play.scene.snapshots(committed=True) + play.scene.snapshots(committed=False)
    if not known:
        return ""
    newest = max(known)
    for step in (newest.step + 1, newest.step + 2, newest.step + 3):
        for sequence in (newest.sequence + 1, newest.sequence + 2):
            file = play.places.run / "snapshots" / f"s{step}~{newest.attempt}.{sequence}"
            if not file.exists():
                file.write_bytes(b"somebody else's")
                os.chown(file, 65534, 65534)
                play.foreign.append(file)
    return f"behind {newest.step}"


def out_of_the_way(play: Play) -> None:
    for file in play.foreign:
        file.unlink(missing_ok=True)
    play.foreign = []


# ---- rot


def rot(play: Play, where: str) -> str:
    """One bit of one file of a snapshot is another one, and everybody is killed."""
    return flip_one_of(play, (getattr(play.places, where) / "snapshots").glob("*/*"))


def rot_in_memory(play: Play) -> str:
    memory = play.stage.memory_of(play.room, play.pick(range(play.room.hosts)))
    return flip_one_of(play, memory.glob("trainckpt-*/*/snapshots/*/*"))


def flip_one_of(play: Play, found: Iterator[Path]) -> str:
    files = sorted(file for file in found if file.is_file() and file.name[0] != ".")
    if not files:
        return ""
    file = play.pick(files)
    play.attempt.kill()
    if not file.exists() or not file.stat().st_size:
        return "nothing but the processes"
    content = bytearray(file.read_bytes())
    at = int(play.pick_share() * len(content))
    content[at] ^= 1 << int(play.pick_share() * 8)
    with file.open("r+b") as out:
        out.write(content)
    return f"byte {at} of {file.parent.name}/{file.name}"


# ---- the store


def doors(play: Play, *answers: Any) -> str:
    """What one rank's door says, to some of its requests."""
    rank = play.pick(range(play.room.ranks))
    share = 0.3 + 0.7 * play.pick_share()
    door = play.stage.store.doors[rank]
    door.reset(
        lambda number: answers[number % len(answers)] if (number * 0.618) % 1 < share else None
    )
    return f"rank {rank}, {share:.0%} of its requests"


def open_doors(play: Play) -> None:
    for door in play.stage.store.doors:
        door.skew_s = 0.0
        door.let_go()


def skewed(play: Play) -> str:
    for door in play.stage.store.doors:
        door.skew_s = play.pick([-3600.0, 3600.0])
    return "an hour"


def kill_store(play: Play) -> str:
    play.stage.store.killed()
    return "the server"


def new_store(play: Play) -> None:
    play.stage.store.begun_again()


def stop_store(play: Play) -> str:
    play.stage.store.stopped()
    return "the server"


def go_on_store(play: Play) -> None:
    play.stage.store.continued()


# ---- what a host has too little of, and its clock


def set_clock(play: Play) -> str:
    hours = play.pick([-24, -1, 1, 24 * 365])
    play.places.clock.write_text(str(hours * 3600))
    return f"{hours} h"


def limit(play: Play, kind: int, room_for: Callable[[int], int]) -> str:
    """One rank may have no more than this."""
    ranks = play.attempt.rank_pids()
    if not ranks:
        return ""
    rank = play.pick(sorted(ranks))
    pid = ranks[rank]
    try:
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (room_for(pid), before[1]))
    except (OSError, ValueError):
        return ""
    play.limited.append((pid, kind, before))
    return f"rank {rank}"


def unlimited(play: Play) -> None:
    for pid, kind, before in play.limited:
        try:
            resource.prlimit(pid, kind, before)
        except OSError:
            continue
    play.limited = []


def descriptors_of(pid: int) -> int:
    numbers = [int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir()]
    return max(numbers) + 2


def memory_of(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize() + (2 << 20)


def out_of_memory(play: Play) -> str:
    """One rank, and all that it starts from now on, may take a little more memory, and no swap."""
    ranks = play.attempt.rank_pids()
    if not ranks:
        return ""
    rank = play.pick(sorted(ranks))
    group = play.group.enter_context(cgroup.made(4 << 20))
    play.group.callback(cgroup.leave, group)
    (group.folder / "cgroup.procs").write_text(str(ranks[rank]))
    return f"rank {rank}"


def more_memory(play: Play) -> None:
    play.group.close()


def file_size_of(_: int) -> int:
    return 30_000


def groups(play: Play) -> str:
    """No process may begin, nor a thread."""
    folder = PROCESSES_GROUP
    folder.mkdir(exist_ok=True)
    members = play.attempt.members()
    for pid in members:
        try:
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            continue
    (folder / "pids.max").write_text((folder / "pids.current").read_text())
    return f"{len(members)} processes"


def no_groups(_: Play) -> None:
    (PROCESSES_GROUP / "pids.max").write_text("max")
    with contextlib.suppress(OSError):  # while processes of the attempt are in it
        PROCESSES_GROUP.rmdir()


def pids_can_be_limited(_: Room) -> bool:
    return Path("/sys/fs/cgroup/pids/cgroup.procs").exists()


@cache
def may_make_groups() -> bool:
    return not cgroup.why_not()


def grouped(_: Room) -> bool:
    return may_make_groups()


def _rows() -> Iterator[tuple[str, Fault]]:
    yield "SIGTERM", Fault(anywhere, one_rank, (signal.SIGTERM,), ends=STOP)
    yield "SIGTERM to all", Fault(anywhere, all_ranks, (signal.SIGTERM,), ends=STOP)
    yield "SIGUSR1", Fault(anywhere, one_rank, (signal.SIGUSR1,), ends=STOP)
    yield "SIGINT twice", Fault(anywhere, one_rank, (signal.SIGINT,) * 2, ends=DEATH | {130, -2})
    yield "SIGKILL", Fault(anywhere, one_rank, (signal.SIGKILL,), ends=DEATH)
    yield "all killed", Fault(anywhere, everybody, ends=DEATH)
    yield "power cut", Fault(anywhere, reboot, ends=DEATH)
    yield "rank suspended", Fault(anywhere, hold_rank, (), wake, DEATH)
    yield "child killed", Fault(has_workers, one_child, (signal.SIGKILL,), ends=DEATH)
    yield "child suspended", Fault(has_workers, one_child, (signal.SIGSTOP,), wake)
    yield "launcher killed", Fault(supervised, launcher, (signal.SIGKILL,), ends=DEATH)
    yield "launcher suspended", Fault(supervised, launcher, (signal.SIGSTOP,), wake)
    yield "launcher told", Fault(supervised, launcher, (signal.SIGTERM,), ends=STOP)
    yield "torchrun killed", Fault(supervised, agent, ends=DEATH)
    yield "dump", Fault(dumping, pause, ends=STOP)
    yield "CRIU killed", Fault(dumping, criu, (signal.SIGKILL,))
    yield "CRIU suspended", Fault(dumping, criu, (signal.SIGSTOP,), wake)
    yield "bit in the dump", Fault(dumping, rot_in_dump, ends=DEATH)
    yield "image lost", Fault(dumping, lose_image, ends=DEATH)
    yield "disk of dumps full", Fault(dumping, full_for_dumps, (), room_for_dumps)
    yield "host lost", Fault(on_hosts, lose_host, ends=DEATH)
    yield "host back with old memory", Fault(on_hosts, old_host, ends=DEATH)
    yield "old run directory", Fault(in_folder, old_directory, ends=DEATH, permits={OLDER})
    for name, number, kinds in (
        ("EIO", errno.EIO, ("read", "write", "sync")),
        ("ENOSPC", errno.ENOSPC, ("change", "write")),
        ("EDQUOT", errno.EDQUOT, ("change", "write")),
        ("ESTALE", errno.ESTALE, disk.ALL),
        ("read-only", errno.EROFS, disk.WRITES),
    ):
        yield name, Fault(on_disk, trouble, (number, kinds), healthy, STORAGE, {REFUSED})
    yield "slow disk", Fault(on_disk, slow_disk, (0.03,), healthy)
    yield "hanging disk", Fault(on_disk, slow_disk, (1.5, 8), healthy, STORAGE)
    yield "directory away", Fault(on_no_disk, vanish, (), appear, STORAGE | {66}, {REFUSED})
    yield "files in the way", Fault(in_folder, in_the_way, (), out_of_the_way, STORAGE)
    yield (
        "bit in the run",
        Fault(anywhere, rot, ("run",), None, DEATH | {65}, {OLDER, REFUSED}),
    )
    yield "bit in memory", Fault(has_memory, rot_in_memory, ends=DEATH)
    yield "bit in the tier", Fault(has_tier, rot, ("tier",), ends=DEATH)
    yield "store killed", Fault(in_store, kill_store, (), new_store, STORAGE, {REFUSED})
    yield "store suspended", Fault(in_store, stop_store, (), go_on_store, STORAGE, {REFUSED})
    yield "store slow", Fault(in_store, doors, (SLOW,), open_doors)
    yield "store hangs", Fault(in_store, doors, (HOLD,), open_doors, STORAGE, {REFUSED})
    yield "store drops", Fault(in_store, doors, (DROP,), open_doors, STORAGE, {REFUSED})
    for code in (403, 500, 503):
        yield f"store {code}", Fault(in_store, doors, (code,), open_doors, STORAGE, {REFUSED})
    yield "store's clock", Fault(in_store, skewed, (), open_doors)
    yield "host's clock", Fault(anywhere, set_clock)
    yield (
        "memory limit",
        Fault(anywhere, limit, (resource.RLIMIT_AS, memory_of), unlimited, NO_MEMORY, {HANGS}),
    )
    yield "out of memory", Fault(grouped, out_of_memory, (), more_memory, STARVED)
    least = resource.RLIMIT_NOFILE, descriptors_of
    yield "descriptors", Fault(anywhere, limit, least, unlimited, STARVED)
    small = resource.RLIMIT_FSIZE, file_size_of
    yield "file size", Fault(anywhere, limit, small, unlimited, STARVED | {-25, 153})
    yield "processes", Fault(pids_can_be_limited, groups, (), no_groups, STARVED, {HANGS})


CATALOGUE = dict(_rows())
