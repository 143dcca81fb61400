"""Connections to object stores: none in a forked process, none while requests are held."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest

from trainckpt.process_dump.process_tree import ESTABLISHED, descriptors, socket_rows
from trainckpt.storage import connections
from trainckpt.storage.object_store import open_object_store

STORES = pytest.mark.parametrize(
    ("server", "url"),
    [
        ("rclone_server", "s3://bucket/connections"),
        ("azurite_server", "az://bucket/connections"),
    ],  # Google's emulator ends each connection with its answer
)


def connected_to(port):
    """The sockets of this process with a connection to the port."""
    mine = {each.target for each in descriptors(os.getpid())}
    rows = socket_rows(os.getpid(), ("tcp", "tcp6"))
    return [
        inode
        for row in rows
        if row[2].endswith(f":{port:04X}") and row[3] == ESTABLISHED
        for inode in [f"socket:[{row[9]}]"]
        if inode in mine
    ]


@STORES
def test_a_fork_has_none_and_the_parent_keeps_its_own(server, url, request, at):
    server = request.getfixturevalue(server)
    at(server)
    store = open_object_store(url)
    store.replace("k", b"1")
    before = connected_to(server.port)
    assert before
    seen, tell = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: tell.send(connected_to(server.port))
    )
    child.start()
    assert seen.poll(60)
    assert seen.recv() == []
    child.join()
    assert child.exitcode == 0
    assert connected_to(server.port) == before
    assert store.read("k", max_bytes=1) == b"1"


@STORES
def test_held_requests_wait_without_a_connection_and_are_repeated(server, url, request, at):
    """Uploads in progress are cut off, and then go on as if nothing had been."""
    server = request.getfixturevalue(server)
    at(server)
    store = open_object_store(url)
    data = memoryview(bytes(64 << 20))
    failures = []

    def write(name):
        try:
            store.write(name, [data])
            assert store.create(f"{name}-created", b"1")
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=write, args=(f"k{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    while not connected_to(server.port):
        time.sleep(0.001)
    connections.hold_requests()
    try:
        assert connected_to(server.port) == []
        time.sleep(0.2)
        assert connected_to(server.port) == []
        assert any(thread.is_alive() for thread in threads)
    finally:
        connections.release_requests()
    for thread in threads:
        thread.join()
    assert not failures
    assert [store.size(f"k{n}") for n in range(4)] == [len(data)] * 4
    assert store.health().num_given_up == 0
