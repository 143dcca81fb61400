"""Memory in no file system: found as long as its holder lives, and nothing else in its place."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainckpt.tiers import memfd, memory
from trainckpt.tiers.arena import Own
from trainckpt.tiers.memfd import Target
from trainckpt.tiers.memory import MemoryPlace

pytestmark = pytest.mark.skipif(not memfd.is_available(), reason="the system has no memfd")

FOLDER, FILE = "snapshots/s1~1.1", "rank00000.safetensors"
NUM_BYTES = 10_000
HOLDS = """
    import contextlib, os, sys
    from trainckpt.tiers.memfd import Target
    from trainckpt.tiers.memory import MemoryPlace
    place = MemoryPlace.of(sys.argv[1])
    held = lambda fd, token, _: contextlib.nullcontext(Target(token, os.getpid(), fd))
    arena = place.held_arena(0, 0, held)
    arena.reserve(int(sys.argv[2]))
    arena.memory[:] = b"x" * int(sys.argv[2])
    arena.publish(sys.argv[3], sys.argv[4])
    if "busy" not in sys.argv:
        kept = os.dup(arena.descriptor)
        os.dup2(kept, arena.descriptor)  # the same descriptor, without its lock
    print("made", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path):
    found = MemoryPlace.of(str(tmp_path))
    yield found
    found.remove()


@contextlib.contextmanager
def holder(run, *more):
    """A process that holds a published arena of this run, until it is killed."""
    command = [sys.executable, "-c", textwrap.dedent(HOLDS), run, NUM_BYTES, FOLDER, FILE, *more]
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "made\n"
        try:
            yield process
        finally:
            process.kill()


def own(descriptor, token, _):
    """This process is the holder."""
    return contextlib.nullcontext(Target(token, os.getpid(), descriptor))


def test_what_another_process_holds_is_found_and_may_be_filled_again(place, tmp_path):
    with holder(tmp_path):
        held = place.held(FOLDER, FILE, NUM_BYTES)
        assert bytes(held.data) == b"x" * NUM_BYTES
        held.close()
        assert place.taken.tmpfs == 0
        assert place.taken == place.left_by(0)
        assert place.taken.memfd >= NUM_BYTES
        assert not place.is_in_use
        arena = place.arena(0, 0)
        assert arena.holds() == [FOLDER]
        arena.reserve(3 * NUM_BYTES)
        assert place.folders() == []
        arena.memory[:] = b"y" * (3 * NUM_BYTES)
        arena.publish("snapshots/s2~1.2", FILE)
        arena.close()
        held = place.held("snapshots/s2~1.2", FILE, 3 * NUM_BYTES)
        assert bytes(held.data) == b"y" * (3 * NUM_BYTES)
        held.close()


def test_what_its_holder_writes_itself_is_neither_read_nor_given_back(place, tmp_path):
    with holder(tmp_path, "busy"):
        assert place.is_in_use
        assert place.held(FOLDER, FILE) is None
        place.keep_arenas([], 9, [])
        assert place.path_of(0, 0).is_symlink()


def test_the_link_of_a_holder_that_is_dead_counts_for_nothing_and_is_swept(place, tmp_path):
    with holder(tmp_path):
        pass
    link = place.path_of(0, 0)
    assert link.is_symlink()
    assert place.folders() == [FOLDER]
    assert place.held(FOLDER, FILE) is None
    assert place.num_bytes == 0
    assert not place.is_in_use
    memory.reclaim()
    assert not place.root.exists()


@pytest.mark.parametrize("beyond", [False, True], ids=["tmpfs", "memfd"])
def test_an_arena_takes_the_place_of_one_whose_holder_is_dead(place, tmp_path, beyond):
    with holder(tmp_path):
        pass
    arena = place.held_arena(0, 0, own) if beyond else place.arena(0, 0)
    assert arena.is_memfd == beyond
    assert place.folders() == []
    arena.reserve(100)
    arena.publish(FOLDER, FILE)
    assert arena.holds() == [FOLDER]
    arena.remove()
    assert not place.path_of(0, 0).is_symlink()


def test_whoever_gives_back_memory_leaves_the_names_that_are_another_s_by_now(place):
    """As after a restore: its holder has gone, and somebody else has taken its place."""
    old = place.held_arena(0, 0, own)
    old.reserve(NUM_BYTES)
    old.publish(FOLDER, FILE)
    for path in (old.path, place.root / FOLDER / FILE):
        path.unlink()
    new = place.held_arena(0, 0, own)
    new.reserve(NUM_BYTES)
    new.publish(FOLDER, FILE)
    place._drop(new.path)  # as a sweep that has found the link that stood there before dead
    old.retract()
    old.remove()
    assert new.is_there
    assert new.holds() == [FOLDER]
    new.remove()
    assert place.folders() == []


def other_memfd():
    descriptor, _ = memfd.make()
    return descriptor


def a_pipe():
    return os.pipe()[0]


@pytest.mark.parametrize("other", [other_memfd, a_pipe, lambda: 10**8], ids=["memfd", "pipe", ""])
def test_what_has_the_number_of_a_descriptor_by_now_is_not_taken_for_it(place, other):
    """As after a process has got the number of one that is dead."""
    arena = place.held_arena(0, 0, own)
    arena.reserve(NUM_BYTES)
    arena.publish(FOLDER, FILE)
    assert arena.is_there
    assert not memfd.is_dead(arena.path)
    target = memfd.read_link(arena.path)
    number = other()
    for path in (arena.path, place.root / FOLDER / FILE):
        path.unlink()
        path.symlink_to(str(target._replace(descriptor=number)))
        assert memfd.is_dead(path)
        with pytest.raises(memfd.Gone):
            memfd.open_file(path, os.O_RDONLY)
    assert not arena.is_there
    assert place.held(FOLDER, FILE) is None
    arena.close()


@pytest.mark.parametrize(
    "text", ["/etc/passwd", "memfd:", f"memfd:{'0' * 32}@0/3", f"memfd:{'0' * 32}@1/../3"]
)
def test_a_link_that_is_not_ours_is_not_followed(tmp_path, text):
    link = tmp_path / "link"
    link.symlink_to(text)
    assert memfd.read_link(link) is None
    with pytest.raises(memfd.Gone):
        memfd.open_file(link, os.O_RDWR | os.O_CREAT)
    assert Target.parse(str(Target("a" * 32, 7, 8))) == Target("a" * 32, 7, 8)


def test_a_holder_that_does_not_hold_it_is_found_out(place):
    def lies(_, token, __):
        return contextlib.nullcontext(Target(token, os.getpid(), other_memfd()))

    with pytest.raises(memfd.Gone):
        place.held_arena(0, 0, lies)
    assert list((place.root / "arenas").iterdir()) == []


def test_only_its_user_may_open_it_and_nobody_execute_it():
    descriptor, token = memfd.make()
    assert memfd.is_named(descriptor, token)
    assert not memfd.is_named(descriptor, "0" * 32)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_memory_of_a_process_own_has_no_name(place):
    arena = Own(place)
    arena.reserve(NUM_BYTES)
    arena.memory[:] = b"x" * NUM_BYTES
    arena.publish(FOLDER, FILE)
    assert arena.holds() == [FOLDER]
    assert place.held(FOLDER, FILE) is None
    assert place.folders() == []
    arena.reserve(NUM_BYTES)
    assert arena.holds() == []
    assert arena.is_there
    assert not arena.outlives
    number = arena.descriptor
    arena.remove()
    assert not Path(f"/proc/self/fd/{number}").is_symlink()
