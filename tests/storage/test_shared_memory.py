"""The memory tier: what is reserved is there, what is published is found, what is taken is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.faults.dead_mount import dead_mount, why_not
from trainckpt.storage import arena as arenas
from trainckpt.storage import counter_page, direct_io, replica_slots, shared_memory
from trainckpt.storage.shared_memory import SharedMemoryDir

FOLDER, FILE = "snapshots/s1~1.1", "rank00000.safetensors"


@pytest.fixture
def place(tmp_path):
    found = SharedMemoryDir.of(str(tmp_path))
    yield found
    found.remove()


def other_process(code, *arguments):
    """Run code in a process that has locks of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def filled(place, data, rank=0, number=0):
    arena = place.arena(rank, number)
    arena.reserve(len(data))
    arena.memory[:] = data
    return arena


def test_what_is_published_is_found_under_its_snapshots_name(place):
    arena = filled(place, b"x" * 10_000)
    assert place.held(FOLDER, FILE, 10_000) is None
    arena.publish(FOLDER, FILE)
    assert arena.holds() == [FOLDER] == place.folders()
    arena.close()
    held = place.held(FOLDER, FILE, 10_000)
    assert bytes(held.data) == b"x" * 10_000
    held.close()


def test_what_is_held_is_copied_from_any_byte_on_and_no_further_than_it_goes(place, monkeypatch):
    monkeypatch.setattr(arenas, "STEP_BYTES", 3000)
    data = os.urandom(10_000)
    arena = filled(place, data)
    arena.publish(FOLDER, FILE)
    arena.close()
    found = place.held(FOLDER, FILE)
    into = bytearray(9000)
    found.fill(1000, memoryview(into))
    assert into == data[1000:]
    with pytest.raises(OSError, match="ends before byte 10001"):
        found.fill(1001, memoryview(into))
    found.close()


def test_who_has_locked_an_arenas_pages_hears_of_it_before_they_go(place):
    """Beyond a file's new end they are nobody's; what is written to them later is lost."""
    arena = place.arena(0, 0)
    heard = []

    def keeps(memory, num_bytes):
        heard.append((len(memory), num_bytes, arena.path.stat().st_size))
        memory[len(memory) - 1] = 1  # they are there still

    arena.keeps = keeps
    arena.reserve(10_000)
    arena.reserve(10_000)
    assert heard == []
    arena.reserve(5_000)
    assert heard == [(10_000, 5_000, 10_000)]
    heard.clear()
    arena.keeps = lambda memory, num_bytes: heard.append((len(memory), num_bytes))
    arena.reserve(20_000)
    assert heard == []  # it has grown under its mapping
    arena.reserve(50_000)
    assert heard == [(20_000, 0)]
    arena.empty()
    assert heard[1:] == [(50_000, 0)]
    arena.reserve(5_000)
    arena.close()
    assert heard[2:] == [(5_000, 0)]


def test_no_other_process_gets_an_arena_that_was_given_another_mapping(place, tmp_path):
    """A mapping has a descriptor of its own, and to close that gives up the process's lock."""
    tries = """
        import sys
        from trainckpt.storage.shared_memory import SharedMemoryDir, ArenaInUse
        for number in range(2):
            try:
                SharedMemoryDir.of(sys.argv[1]).arena(0, number)
            except ArenaInUse:
                print("taken")
    """
    grown, begun = filled(place, b"x" * 10_000), filled(place, b"x" * 10_000, number=1)
    grown.reserve(100_000)
    begun.begin(100_000)
    assert other_process(tries, tmp_path) == "taken\ntaken"
    grown.close()
    begun.close()


def test_it_outlives_the_process_that_wrote_it(place, tmp_path):
    other_process(
        """
        import sys
        from trainckpt.storage.shared_memory import SharedMemoryDir
        arena = SharedMemoryDir.of(sys.argv[1]).arena(0, 0)
        arena.reserve(5000)
        arena.memory[:] = b"y" * 5000
        arena.publish(sys.argv[2], sys.argv[3])
        """,
        tmp_path,
        FOLDER,
        FILE,
    )
    held = place.held(FOLDER, FILE, 5000)
    assert bytes(held.data) == b"y" * 5000
    held.close()


@pytest.mark.parametrize("first_byte", [0, 4096, 777])
@pytest.mark.parametrize("lies_at", [0, 777, 100])
def test_what_is_held_is_copied_wherever_it_lies(place, first_byte, lies_at):
    data = os.urandom(2_500_000)
    arena = filled(place, data)
    arena.publish(FOLDER, FILE)
    arena.close()
    held = place.held(FOLDER, FILE, len(data))
    into = direct_io.private_memory(len(data) - first_byte - 99, lies_at)
    held.fill(first_byte, into)
    assert bytes(into) == data[first_byte:-99]
    held.close()


CUT = """
    import os, sys
    from trainckpt.storage import direct_io as direct
    from trainckpt.storage.shared_memory import SharedMemoryDir
    held = SharedMemoryDir.found(sys.argv[1]).held(sys.argv[2], sys.argv[3])
    os.truncate(sys.argv[4], 500_000)
    into = direct.private_memory(900_000)
    try:
        held.fill(0, into)
    except OSError as error:
        print(error)
"""


def test_a_file_that_is_cut_although_it_is_held_is_an_error_and_ends_no_process(place, tmp_path):
    arena = filled(place, os.urandom(1_000_000))
    arena.publish(FOLDER, FILE)
    path = arena.path
    arena.close()
    if path.is_symlink():
        pytest.skip("what is in no file system is not cut by its name")
    assert "ends before" in other_process(CUT, tmp_path, FOLDER, FILE, path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_is_forked_has_nothing_of_what_is_held(place):
    """A loader's worker outlives the file's name."""
    arena = filled(place, b"x" * 10_000)
    arena.publish(FOLDER, FILE)
    arena.close()
    held = place.held(FOLDER, FILE)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
            found += Path("/proc/self/maps").read_text().splitlines()
            os.write(writing, b"held" if any(FILE in line for line in found) else b"nothing")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"nothing"
    os.close(reading)
    os.close(writing)
    assert FILE in Path("/proc/self/maps").read_text()
    assert bytes(held.data) == b"x" * 10_000
    held.close()


def test_a_file_of_another_length_is_not_it(place):
    arena = filled(place, b"x" * 100)
    arena.publish(FOLDER, FILE)
    arena.close()
    assert place.held(FOLDER, FILE, 101) is None
    assert place.held(FOLDER, "rank00001.safetensors", 100) is None


def test_an_arena_that_is_reserved_again_is_found_no_more(place):
    arena = filled(place, b"x" * 10_000)
    arena.publish(FOLDER, FILE)
    arena.reserve(12_000)
    assert place.folders() == []
    assert arena.path.stat().st_size == 12_000
    arena.reserve(4_000)
    arena.memory[:] = b"z" * 4_000
    assert arena.path.read_bytes() == b"z" * 4_000
    arena.close()


ASK = """
    import sys
    from trainckpt.storage.shared_memory import SharedMemoryDir, ArenaInUse
    place = SharedMemoryDir.found(sys.argv[1])
    try:
        place.arena(0, 0)
        print("had")
    except ArenaInUse:
        print("taken")
    print(place.held(sys.argv[2], sys.argv[3], 100))
"""


def test_what_another_process_writes_is_neither_written_nor_read(place, tmp_path):
    arena = filled(place, b"x" * 100)
    arena.publish(FOLDER, FILE)
    assert other_process(ASK, tmp_path, FOLDER, FILE).split() == ["taken", "None"]
    arena.close()
    assert other_process(ASK, tmp_path, FOLDER, FILE).startswith("had")


def test_what_is_read_is_not_overwritten_by_another_process(place, tmp_path):
    arena = filled(place, b"x" * 100)
    arena.publish(FOLDER, FILE)
    arena.close()
    held = place.held(FOLDER, FILE, 100)
    assert other_process(ASK, tmp_path, FOLDER, FILE).startswith("taken")
    held.close()
    assert other_process(ASK, tmp_path, FOLDER, FILE).startswith("had")


def test_more_than_there_is_is_refused_and_takes_nothing(place):
    arena = place.arena(0, 0)
    with pytest.raises(OSError) as refused:
        arena.reserve(place.free_bytes * 4 + (1 << 40))
    assert refused.value.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
    assert arena.capacity_bytes == 0
    arena.remove()


def test_a_folder_that_others_can_enter_or_that_is_a_link_is_not_used(tmp_path, monkeypatch):
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setenv(shared_memory.ROOT_VARIABLE, str(root))
    user = root / f"trainckpt-{os.getuid()}"
    user.mkdir(mode=0o755)
    assert SharedMemoryDir.of("run") is None
    why = f"{user} belongs to, or is open to, another user"
    assert shared_memory.why_unavailable() == why
    user.chmod(0o700)
    assert SharedMemoryDir.of("run") is not None
    elsewhere = tmp_path / "elsewhere"
    user.rename(elsewhere)
    user.symlink_to(elsewhere)
    assert SharedMemoryDir.of("run") is None
    assert SharedMemoryDir.found("run") is None
    assert shared_memory.why_unavailable() == why


def test_none_means_no_shared_memory(monkeypatch):
    monkeypatch.setenv(shared_memory.ROOT_VARIABLE, shared_memory.NONE)
    assert SharedMemoryDir.of("run") is None
    assert shared_memory.why_unavailable() == "TRAINCKPT_MEMORY=none forbids shared memory"


def test_a_place_for_memory_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(shared_memory.ROOT_VARIABLE, str(tmp_path / "shm"))
    assert SharedMemoryDir.of("run") is None
    assert shared_memory.why_unavailable() == f"{tmp_path}/shm takes no folder of this user"


def test_the_memory_of_a_run_that_is_gone_is_given_back_and_no_other(tmp_path, shm):
    (tmp_path / "stays").mkdir()
    stays, gone = (SharedMemoryDir.of(str(tmp_path / name)) for name in ("stays", "gone"))
    for each in (stays, gone):
        filled(each, b"x" * 100).close()
    shared_memory.reclaim()
    assert stays.root.exists()
    assert not gone.root.exists()


@pytest.fixture
def shm(tmp_path, monkeypatch):
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setenv(shared_memory.ROOT_VARIABLE, str(root))


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_nobody_waits_for_another_run_s_place_that_hangs_and_its_memory_is_kept(tmp_path, shm):
    behind, gone = (SharedMemoryDir.of(str(tmp_path / name)) for name in ("net/run", "gone"))
    for each in (behind, gone):
        filled(each, b"x" * 100).close()
    with dead_mount(tmp_path / "net") as disconnect:
        start = threading.Thread(target=shared_memory.reclaim, daemon=True)
        start.start()
        start.join(30)
        assert not start.is_alive()
        assert not gone.root.exists()
        assert behind.root.exists()
        disconnect()  # from here on it is refused: ENOTCONN
        shared_memory.reclaim()
        assert behind.root.exists()


def test_memory_is_kept_where_nobody_can_tell_whether_the_run_s_place_is_gone(tmp_path, shm):
    place = SharedMemoryDir.of(str(tmp_path / "disk" / "run"))
    filled(place, b"x" * 100).close()
    (tmp_path / "disk").symlink_to("disk")  # looking there is refused: ELOOP
    shared_memory.reclaim()
    assert place.root.exists()
    (tmp_path / "disk").unlink()
    shared_memory.reclaim()
    assert not place.root.exists()


def test_memory_of_which_it_is_not_said_whose_it_is_is_kept_and_its_run_says_it_again(
    tmp_path, shm
):
    place = SharedMemoryDir.of(str(tmp_path / "gone"))
    filled(place, b"x" * 100).close()
    (place.root / "place").write_bytes(b"")
    shared_memory.reclaim()
    assert place.root.exists()
    assert SharedMemoryDir.of(str(tmp_path / "gone")) is not None
    shared_memory.reclaim()
    assert not place.root.exists()


def test_nobody_sees_memory_whose_owner_is_half_said(tmp_path, shm):
    over, seen = threading.Event(), []

    def look():
        while not over.is_set():
            seen.extend(path.read_bytes() for path in (tmp_path / "shm").glob("*/*/place"))

    looking = threading.Thread(target=look)
    looking.start()
    runs = [str(tmp_path / str(number)) for number in range(100)]
    try:
        places = [SharedMemoryDir.of(run) for run in runs]
    finally:
        over.set()
        looking.join()
    assert set(seen) <= {run.encode() for run in runs}
    for place in places:
        assert [path.name for path in place.root.iterdir()] == ["place"]


def test_what_ranks_of_an_earlier_attempt_left_is_given_back(place):
    kept, left = filled(place, b"x" * 100), filled(place, b"y" * 100, rank=7)
    other, more = filled(place, b"z" * 100, rank=1), filled(place, b"z" * 100, number=1)
    for arena in (left, other, more):
        arena.close()
    place.keep_arenas([0, 1], 0, [kept.path])
    names = sorted(path.name for path in (place.root / "arenas").iterdir())
    assert names == ["rank00000.0", "rank00001.0"]
    kept.close()


@pytest.mark.timeout(30)  # a pipe that is opened waits for its other end for ever
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_not_read(place, tmp_path, make):
    for folder in (place.root / "snapshots", place.root / FOLDER):
        folder.mkdir(mode=0o700)
    for path in (f"{FOLDER}/{FILE}", f"{FOLDER}/{replica_slots.MANIFEST}", "counters-1"):
        make(place.root / path)
    assert place.held(FOLDER, FILE) is None
    assert replica_slots.read_manifest(place, FOLDER, 99) is None
    assert not counter_page.read_page(str(tmp_path), 1)
