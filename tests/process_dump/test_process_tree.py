"""What a tree of processes holds open, and what of it forbids a dump. Real descriptors of this
process; nothing is dumped."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainckpt.launcher import processes
from trainckpt.process_dump import dump, process_tree
from trainckpt.process_dump.process_tree import OpenDescriptor, TreeState, why_not

ME = os.getpid()


def of(target: str) -> TreeState:
    """What this process holds of one target, and what others hold of it."""
    held = tuple(each for each in process_tree.descriptors(ME) if each.target == target)
    assert held
    return TreeState(held)


def test_a_file_is_written_or_read_and_a_database_is_seen(tmp_path):
    read, written, base = (tmp_path / name for name in ("read", "written", "base.db"))
    read.write_text("x")
    connection = sqlite3.connect(base)
    connection.execute("create table a (b)")
    connection.commit()
    with read.open(), written.open("a"):
        assert of(str(read)).written() == []
        assert of(str(read)).read() == [str(read)]
        look = of(str(written))
        assert look.written() == [str(written)]
        assert look.read() == []
        assert why_not(look) == []
        elsewhere = replace(look, outside=frozenset({str(written)}))
        assert why_not(elsewhere) == [
            f"process {ME}: {written} is open for writing in another program too"
        ]
    assert why_not(of(str(base))) == [f"process {ME}: {base} is a database, open for writing"]
    connection.close()


@pytest.mark.parametrize("end", ["read", "written"])
def test_a_named_pipe_to_a_process_outside_is_refused(tmp_path, end):
    """What is on its way in it would be lost, or come twice."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    program = "import sys; f = open(sys.argv[1], sys.argv[2]); sys.stdin.read()"
    ours, theirs = ("r", "w") if end == "read" else ("w", "r")
    with (
        subprocess.Popen(
            [sys.executable, "-c", program, path, theirs], stdin=subprocess.PIPE
        ) as other,
        path.open(ours),  # waits for the other end
    ):
        held = next(each for each in process_tree.descriptors(ME) if each.target == str(path))
        outside = process_tree.look([ME]).outside & {str(path)}
        assert why_not(TreeState((held,), outside)) == [
            f"process {ME}: a pipe to a process outside the command ({path})"
        ]
        inside = process_tree.look([ME, other.pid]).outside & {str(path)}
        assert why_not(TreeState((held,), inside)) == []
        other.stdin.close()


def test_who_else_has_a_file_open_for_writing_is_found(tmp_path):
    path = tmp_path / "log"
    program = "import sys; f = open(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    with (
        path.open("a"),
        subprocess.Popen(
            [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other,
    ):
        assert other.stdout.readline() == b"open\n"
        assert str(path) in process_tree.look([ME]).outside
        assert str(path) not in process_tree.look([ME, other.pid]).outside
        assert str(path) not in process_tree.look([ME], besides=[other.pid]).outside
        assert process_tree.processes(other.pid) == [other.pid]
        assert other.pid in process_tree.processes(ME)
        assert other.pid in process_tree.tasks([other.pid])
        other.stdin.close()
        other.wait()
    assert process_tree.taken([other.pid]) == []


def test_a_process_whose_name_is_no_text_is_a_process_like_others(tmp_path):
    """The kernel cuts a name at 15 bytes, wherever that is."""
    link = os.fsencode(tmp_path) + b"/" + "ä".encode() * 8  # the eighth is cut in two
    os.symlink(shutil.which("sleep"), link)  # noqa: PTH211 - no text
    with subprocess.Popen(["sleep", "60"], executable=link) as other:
        try:
            stat = Path(f"/proc/{other.pid}/stat").read_bytes()
            with pytest.raises(UnicodeDecodeError):
                stat.decode()
            assert other.pid in process_tree.processes(ME)
            assert other.pid in processes.children(ME)
        finally:
            other.kill()


def test_a_connection_is_a_stranger_unless_both_ends_are_in_the_tree():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        program = (
            "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
            "print('connected', flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, str(address[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other:
            accepted, peer = server.accept()
            with accepted:
                assert other.stdout.readline() == b"connected\n"
                shown = f"127.0.0.1:{peer[1]} (process {ME})"
                assert shown in process_tree.look([ME]).strangers
                held = f"127.0.0.1:{address[1]} (process {other.pid})"
                assert held in process_tree.look([other.pid]).strangers
                assert shown not in process_tree.look([ME, other.pid]).strangers
            other.stdin.close()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("anon_inode:[io_uring]", "an io_uring is open"),
        ("anon_inode:[userfaultfd]", "a userfaultfd is open"),
        ("/dev/nvidia0", "it holds a GPU"),
        ("/dev/infiniband/uverbs0", "InfiniBand"),
        ("/dev/pts/3", "it holds the terminal /dev/pts/3"),
        ("/dev/fuse", "it holds the device /dev/fuse"),
        ("pipe:[17]", "a pipe to a process outside the command (pipe:[17])"),
    ],
)
def test_what_criu_cannot_dump_is_named(target, why):
    held = OpenDescriptor(1, 0, target, is_pipe=target.startswith("pipe:"))
    look = TreeState((held,), frozenset({"pipe:[17]"}), ("10.0.0.1:443",), (99,))
    told = why_not(look)
    assert told[0] == "process 99 has left the tree of the command"
    assert told[1] == "a connection outside the command, to 10.0.0.1:443"
    assert "process 1: " in told[2]
    assert why in told[2]


@pytest.mark.parametrize(
    "target", ["/dev/null", "/dev/urandom", "/dev/shm/x", "pipe:[18]", "anon_inode:[eventpoll]"]
)
def test_what_every_process_has_is_no_obstacle(target):
    held = OpenDescriptor(1, 0, target, os.O_RDWR, is_pipe=target.startswith("pipe:"))
    assert why_not(TreeState((held,), frozenset({"pipe:[17]"}))) == []


def test_who_is_called_by_half_a_letter_is_looked_at_all_the_same():
    code = """
import os
from pathlib import Path
from trainckpt.process_dump import criu
from trainckpt.process_dump import gpu_state as gpu_signs
before = criu.is_privileged()
Path("/proc/self/comm").write_bytes(b"a" * 14 + b"\\xc3")
assert criu.is_privileged() is before
print(ascii(gpu_signs._threads(os.getpid())[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{'a' * 14 + chr(0xFFFD)!a}\n"


def test_files_that_cannot_be_made_durable_refuse_no_dump(tmp_path):
    """Some kinds have no fsync; where the disk fails, or a file has gone, it is refused."""
    written = tmp_path / "log"
    written.touch()
    dump._sync_written(SimpleNamespace(written=lambda: ["/proc/self/comm", str(written)]))
    with pytest.raises(FileNotFoundError):
        dump._sync_written(SimpleNamespace(written=lambda: [str(tmp_path / "gone")]))
