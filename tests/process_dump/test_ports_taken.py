"""Ports of a dumped tree that others have got meanwhile are waited for."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from tests.process_dump.test_refusals import PROGRAM, Counting
from trainckpt.errors import UnusableSnapshot
from trainckpt.process_dump import criu, ids_and_ports

LISTENS = "import socket; s = socket.create_server(('127.0.0.1', 0))\n"


@pytest.fixture
def listening(criu_here, tmp_path):
    """A process that counts, and listens at a port."""
    found = Counting(tmp_path, criu_here.program, criu_here.version, LISTENS + PROGRAM)
    try:
        assert found.counts_on()
        yield found
    finally:
        found.end()


def connection(port=0):
    """A connection from this port, as a client has one: nobody may share it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", port))
        return ours, server.accept()[0]


def closed(port=0):
    """Such a port, whose connection was closed just now."""
    ours, theirs = connection(port)
    port = ours.getsockname()[1]
    ours.close()
    theirs.close()
    return port


def test_who_has_a_port_is_named():
    (ours, theirs), left = connection(), closed()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        listened, connected = (each.getsockname()[1] for each in (server, ours))
        assert (
            ids_and_ports.who_has([listened]) == f"port {listened} (a program listens there) in use"
        )
        assert ids_and_ports.who_has([connected]) == f"port {connected} (a connection's) in use"
        both = ids_and_ports.who_has([left, listened])
        assert f"{left} (a closed connection's, for up to a minute)" in both
        with ExitStack() as more:
            others = [more.enter_context(socket.create_server(("", 0))) for _ in range(4)]
            assert " and 1 more in use" in ids_and_ports.who_has(
                [s.getsockname()[1] for s in others]
            )
    assert ids_and_ports.who_has([]) == ids_and_ports.who_has([1]) == ""


def test_what_criu_says_of_a_port_is_told_from_what_it_says_of_others():
    said = criu.said(
        "(0.1) Error (criu/x.c:1): other\n"
        * 2
        + "(0.2) Error (criu/sk-inet.c:1): inet: Can't bind inet socket (id 79): "
        "Address already in use\n"
    )
    assert said.startswith("inet: Can't bind")
    assert criu.is_port_taken(said)
    assert not criu.is_port_taken(said.replace("Address already in use", "Permission denied"))
    assert not criu.is_number_taken(said)


def test_a_port_that_is_taken_is_waited_for_and_that_is_said(listening):
    record, heard = listening.dump(), []
    (port,) = record.ports
    ours, theirs = connection(port)

    def say(line):
        heard.append(line)
        theirs.close()  # who closes first keeps its own port for a minute
        ours.close()

    try:
        listening.restore(record, say=say)
    finally:
        ours.close()
        theirs.close()
    assert listening.counts_on()
    asked = f"{record.name} waits up to 75 s for its ports: port {port} (a connection's) in use"
    assert heard == [asked]


def test_a_port_that_stays_taken_ends_the_restore_and_the_dump_stays(listening, monkeypatch):
    record, claims = listening.dump(), []
    monkeypatch.setattr(ids_and_ports, "FREE_WITHIN_S", 0.5)
    (port,) = record.ports

    def claim():
        claims.append(record)
        return {}

    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(UnusableSnapshot, match=f"port {port} .a program listens there. in use"):
            listening.restore(record, claim=claim)
        assert claims == []
    listening.restore(record, claim=claim)
    assert listening.counts_on()
    assert claims == [record]
