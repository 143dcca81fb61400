"""The supervisor holds memory of its ranks: it outlives them, and is given up with its link."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainckpt.lifecycle.run import held as asking
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE
from trainckpt.snapshot import messages
from trainckpt.supervisor.held import TALK_WITHIN_S, HeldMemory
from trainckpt.tiers import memfd
from trainckpt.tiers.memory import MemoryPlace

pytestmark = pytest.mark.skipif(not memfd.is_available(), reason="the system has no memfd")

FOLDER, FILE = "snapshots/s1~1.1", "rank00000.safetensors"
RANK = """
    import os, signal, sys
    from trainckpt.lifecycle.run import held
    from trainckpt.tiers.memory import MemoryPlace
    arena = MemoryPlace.of(sys.argv[1]).held_arena(0, 0, held.holder())
    arena.reserve(5000)
    arena.memory[:] = b"y" * 5000
    arena.publish(sys.argv[2], sys.argv[3])
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The supervisor's, named to its ranks; a short path, for a socket's is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(tmp_path))
    return tmp_path


def descriptors():
    """Memfds of ours that this process has open."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith(f"/memfd:{memfd.PREFIX}"):
                found.add(path.name)
    return found


def test_it_outlives_its_rank_and_is_given_up_when_its_link_is_gone(folder, tmp_path):
    before = descriptors()
    with contextlib.closing(HeldMemory()) as memory:
        with memory.serving(folder):
            ran = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(RANK), str(tmp_path), FOLDER, FILE],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert ran.returncode == -9, ran.stderr
        with memory.serving(folder):  # the next attempt
            place = MemoryPlace.found(str(tmp_path))
            held = place.held(FOLDER, FILE, 5000)
            assert bytes(held.data) == b"y" * 5000
            held.close()
            assert len(descriptors() - before) == 1
            place.remove()
            until_s = time.monotonic() + 30
            while descriptors() - before and time.monotonic() < until_s:
                time.sleep(0.05)
            assert descriptors() == before


def test_at_its_end_memory_and_links_are_gone(folder, tmp_path):
    before = descriptors()
    memory = HeldMemory()
    with memory.serving(folder):
        place = MemoryPlace.of(str(tmp_path))
        arena = place.held_arena(0, 0, asking.holder())
        arena.reserve(5000)
        arena.publish(FOLDER, FILE)
        arena.close()
        assert place.folders() == [FOLDER]
    memory.close()
    assert not place.root.exists()
    assert descriptors() == before


def test_what_is_no_such_memory_is_not_held_and_stops_nobody(folder, tmp_path):
    before = descriptors()
    place = MemoryPlace.of(str(tmp_path))
    token = "0" * 32
    reading, writing = os.pipe()
    other, theirs = memfd.make()
    bodies = [
        ({"token": token, "path": str(place.path_of(0, 0))}, reading),
        ({"token": theirs, "path": "/etc/passwd"}, other),
        ({"token": theirs, "path": str(place.path_of(0, 0))}, None),
        ([], other),
    ]
    with contextlib.closing(HeldMemory()) as memory, memory.serving(folder):
        for body, descriptor in bodies:
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(str(folder / asking.SOCKET))
                if body:
                    messages.send(end, body, descriptor=descriptor)
                else:
                    socket.send_fds(end, [(2).to_bytes(8, "little") + b"[]"], [descriptor])
                end.settimeout(10)
                assert end.recv(1) == b""
        hold = asking.holder()
        with (
            pytest.raises(OSError, match="the supervisor did not take it"),
            hold(reading, token, place.path_of(0, 0)),
        ):
            pass
        place.held_arena(0, 0, hold).remove()
    for descriptor in (reading, writing, other):
        os.close(descriptor)
    place.remove()
    assert descriptors() == before


def test_ranks_that_say_nothing_keep_no_other_waiting(folder, tmp_path):
    """As ranks that were stopped after they had connected: more than others have patience for."""
    silent = 1 + int(asking.ANSWER_WITHIN_S / TALK_WITHIN_S)
    with contextlib.closing(HeldMemory()) as memory, memory.serving(folder):
        with contextlib.ExitStack() as stopped:
            for _ in range(silent):
                end = stopped.enter_context(socket.socket(socket.AF_UNIX))
                end.connect(str(folder / asking.SOCKET))
            place = MemoryPlace.of(str(tmp_path))
            arena = place.held_arena(0, 0, asking.holder())
            assert arena.is_there
        arena.remove()
        place.remove()


def test_without_a_supervisor_nobody_is_asked(folder, monkeypatch):
    assert asking.holder() is None  # one that does not serve
    monkeypatch.delenv(SUPERVISOR_VARIABLE)
    assert asking.holder() is None
