"""Clients of an endpoint: slow, wrong and gone ones; and processes forked amid a request."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from tests.cli.test_pause import wait_for
from tests.metrics.scraping import (
    Values,
    free_port,
    scrape,
    sockets,
    step,
    taken_port,
    tracked,
    warnings,
)
from trainckpt import Checkpointer
from trainckpt.metrics import prometheus_output


@pytest.fixture
def port(tmp_path):
    """Of a run in this process that is scraped already."""
    port, parts = free_port(), tracked()
    with Checkpointer(tmp_path / "run", every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: scrape(port))
        yield port


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=30)


@pytest.mark.parametrize("says", [b"", b"GET /metrics HTTP/1.1\r\nX: "])
def test_a_client_gets_its_time_in_all_however_it_divides_it(port, monkeypatch, says):
    """One that sends a byte now and then, or nothing, holds up the others no longer."""
    monkeypatch.setattr(prometheus_output, "REQUEST_WITHIN_S", 0.3)
    with connected(port) as slow:
        slow.sendall(says)
        cut_off, is_over = threading.Event(), threading.Event()

        def trickle():
            try:
                while says and not is_over.wait(0.02):
                    slow.sendall(b"x")
            except OSError:
                cut_off.set()

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert Values(scrape(port))["running"] == 1
            assert not says or cut_off.wait(60)
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"\x16\x03\x01 garbage", b"400"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"414"),
        (b"GET / HTTP/1.1" + b"\r\nX: y" * 200, b"431"),
        (b"GET / HTTP/9.9", b"505"),
        (b"HEAD /metrics HTTP/1.1", b"405"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 9999999", b"405"),
        (b"GET /favicon.ico HTTP/1.1", b"200"),
        (b"GET /other?name[]=x HTTP/1.1", b"200"),
    ],
)
def test_a_request_that_is_none_is_answered_in_a_line_and_disturbs_nothing(
    port, capfd, request_line, status
):
    with connected(port) as client:
        client.sendall(request_line + b"\r\n\r\n")
        assert status in client.recv(65536)
    assert Values(scrape(port))["running"] == 1
    assert capfd.readouterr().err == ""


def test_values_that_cannot_be_read_are_logged_once_and_printed_nowhere(tmp_path, caplog, capfd):
    port, parts = free_port(), tracked()
    with Checkpointer(tmp_path / "run", every="never", metrics=f"http:{port}", **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: scrape(port))
        readings = ckpt._listener.metrics._readings
        read, readings._timings = readings._timings, None
        answers = [scrape(port) for _ in range(3)]
        readings._timings = read
        assert Values(scrape(port))["running"] == 1
    assert answers == ["", "", ""]
    (warning,) = warnings(caplog)
    assert "AttributeError" in warning
    assert "Traceback" not in capfd.readouterr().err


def test_a_process_forked_amid_a_request_does_not_hold_its_connection(port):
    before = sockets("self")
    with connected(port) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no more for now
        own = f"socket:[{os.fstat(client.fileno()).st_ino}]"
        wait_for(lambda: len(sockets("self") - before) == 2)
        (accepted,) = sockets("self") - before - {own}
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, b"holds it" if accepted in sockets("self") else b"free")
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            assert answer.read() == b"free"
        os.waitpid(child, 0)
        client.sendall(b"\r\n")
        assert b"200 OK" in client.recv(65536)


# ---- addresses


def test_an_address_of_another_host_is_refused_with_one_that_would_do(tmp_path, caplog):
    parts = tracked()
    with Checkpointer(tmp_path / "run", metrics="http:192.0.2.1:9464", **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: warnings(caplog))
    (warning,) = warnings(caplog)
    assert "192.0.2.1 port 9464" in warning
    assert 'metrics="http:127.0.0.1:9464"' in warning


@pytest.mark.parametrize(
    ("host", "port", "hint"),
    [("::1", 9464, "http:[::1]:9465"), ("127.0.0.1", 65535, "http:127.0.0.1:65534")],
)
def test_a_hint_is_an_option_that_can_be_typed(host, port, hint):
    from trainckpt.attempt.metrics_target import parse_metrics_target

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        try:
            taken.bind((host, port))
        except OSError as error:
            pytest.skip(f"{host} port {port} is not free here: {error}")
        taken.listen()
        endpoint = prometheus_output.HttpEndpoint(host, port, None, print)
        with pytest.raises(prometheus_output.MetricsUnpublished) as caught:
            endpoint.open()
        endpoint.close()
    assert f'metrics="{hint}"' in caught.value.hint
    assert parse_metrics_target(hint).address == host


def test_a_port_is_taken_once_it_is_free(tmp_path, monkeypatch, caplog):
    from trainckpt.metrics import publisher

    monkeypatch.setattr(publisher, "PUBLISH_EVERY_S", 0.02)
    parts = tracked()
    with contextlib.ExitStack() as other:
        port = other.enter_context(taken_port())
        with Checkpointer(tmp_path / "run", metrics=f"http:{port}", **parts) as ckpt:
            step(ckpt, parts)
            wait_for(lambda: warnings(caplog))
            other.close()
            wait_for(lambda: scrape(port))


def test_two_runs_of_one_process_have_an_endpoint_and_a_file_each(tmp_path, caplog):
    ports, folder = [free_port(), free_port()], tmp_path / "node_exporter"
    folder.mkdir()
    first, second, third = tracked(), tracked(), tracked()
    with (
        Checkpointer(tmp_path / "a", metrics=f"http:{ports[0]}", **first) as a,
        Checkpointer(tmp_path / "b", metrics=f"http:{ports[1]}", **second) as b,
        Checkpointer(tmp_path / "c", metrics=f"textfile:{folder}", **third) as c,
    ):
        for ckpt, parts, steps in ((a, first, 1), (b, second, 2), (c, third, 3)):
            for _ in range(steps):
                step(ckpt, parts)
        wait_for(lambda: all(map(scrape, ports)))
        found = [Values(scrape(port)) for port in ports]
    (path,) = folder.iterdir()
    found.append(Values(path.read_text()))
    assert [values.run for values in found] == [(str(tmp_path / name), "1") for name in "abc"]
    assert [values["steps_total"] for values in found] == [1, 2, 3]
    assert warnings(caplog) == []
