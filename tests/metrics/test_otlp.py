"""Metrics pushed by OTLP: what a receiver decodes, and receivers that are not there."""

from __future__ import annotations

import contextlib
import http.server
import logging
import os
import random
import signal
import socket
import threading
import time

import pytest
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from tests.cli.test_pause import living, plain, wait_for  # noqa: F401 - `plain` is a fixture
from tests.metrics.scraping import free_port, step, tracked, warnings
from trainckpt import Checkpointer
from trainckpt.metrics import publisher
from trainckpt.metrics.metric_table import BYTES, COUNTER, GAUGE, METRICS, SECONDS


class Receiver(http.server.ThreadingHTTPServer):
    """An OTLP receiver that decodes what it gets; `refuses` with that status."""

    daemon_threads = True

    def __init__(self, refuses=None, header=None):
        self.requests, self.paths, self.refuses, self.header = [], [], refuses, header
        self.connections, self.attributes = set(), {}
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def target(self):
        return f"otlp:http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        request = ExportMetricsServiceRequest()
        request.ParseFromString(data)
        self.server.requests.append(request)
        self.server.paths.append((self.path, self.headers["Content-Type"]))
        self.server.header = self.headers.get("X-Token")
        self.server.connections.add(self.headers.get("Connection"))
        (resource,) = request.resource_metrics
        self.server.attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
        self.send_response(self.server.refuses or 200)
        answer = ExportMetricsServiceResponse().SerializeToString()
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def receiver(**how):
    with Receiver(**how) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def decoded(request):
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "trainckpt"
    return {metric.name: metric for metric in scope.metrics}


def points(metric):
    return getattr(metric, metric.WhichOneof("data")).data_points


def number(metric, **wanted):
    """The value of the only point with these attributes."""
    (found,) = [
        point
        for point in points(metric)
        if wanted.items() <= {a.key: a.value.string_value for a in point.attributes}.items()
    ]
    return found.as_double if found.WhichOneof("value") == "as_double" else found.as_int


def test_a_receiver_decodes_the_first_values_and_the_last(tmp_path):
    run, parts = tmp_path / "run", tracked()
    with receiver() as server:
        with Checkpointer(run, every="1 step", metrics=server.target, **parts) as ckpt:
            step(ckpt, parts)
            wait_for(lambda: server.requests)
            for _ in range(4):
                step(ckpt, parts)
        first, last = decoded(server.requests[0]), decoded(server.requests[-1])
    assert set(server.paths) == {("/v1/metrics", "application/x-protobuf")}
    assert len(server.requests) == 2
    labels = {"run": str(run), "attempt": "1"}
    assert number(first["trainckpt_running"], **labels) == 1
    assert number(last["trainckpt_running"], **labels) == 0
    assert number(last["trainckpt_steps_total"], **labels) == 5
    assert number(last["trainckpt_last_durable_step"], tier="local", **labels) == 5
    assert number(last["trainckpt_badput_seconds_total"], bucket="training_prep") > 0
    (stalls,) = points(last["trainckpt_save_stall_seconds"])
    assert stalls.count == sum(stalls.bucket_counts) >= 2
    assert len(stalls.bucket_counts) == len(stalls.explicit_bounds) + 1
    assert stalls.sum > 0
    assert 0 < stalls.start_time_unix_nano < stalls.time_unix_nano


def test_names_units_and_kinds_are_those_of_the_table(tmp_path):
    parts, table = tracked(), {metric.name: metric for metric in METRICS}
    how = {"every": "1 step", "tiers": str(tmp_path / "far"), "grace": "9 s"}
    with receiver() as server:
        with Checkpointer(tmp_path / "run", metrics=server.target, **how, **parts) as ckpt:
            step(ckpt, parts)
            ckpt.save()
            step(ckpt, parts)
        found = decoded(server.requests[-1])
    assert found.keys() <= table.keys()
    assert len(found) > len(table) - 3  # without a restore and a step's time
    for name, metric in found.items():
        assert metric.unit in (SECONDS, BYTES, "")
        assert metric.unit == table[name].unit
        kind = {COUNTER: "sum", GAUGE: "gauge"}.get(table[name].kind, "histogram")
        assert metric.WhichOneof("data") == kind
        if kind == "sum":
            assert metric.sum.is_monotonic


def test_the_global_generator_is_not_drawn_from(tmp_path):
    """The exporter draws before each request: a script would shuffle otherwise."""
    parts = tracked()
    with receiver() as server:
        with Checkpointer(tmp_path / "run", metrics=server.target, **parts) as ckpt:
            random.seed(7)
            before = random.getstate()
            step(ckpt, parts)
            wait_for(lambda: server.requests)
        assert len(server.requests) == 2
    assert random.getstate() == before


def test_headers_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    parts = tracked()
    with receiver() as server:
        with Checkpointer(tmp_path / "run", metrics=server.target, **parts) as ckpt:
            step(ckpt, parts)
        assert server.header == "abc"


def test_a_header_that_cannot_be_read_is_named_by_its_variable_and_shown_nowhere(
    tmp_path, monkeypatch, caplog, capfd
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization: Bearer geheim")
    parts = tracked()
    with (
        receiver() as server,
        Checkpointer(tmp_path / "run", metrics=server.target, **parts) as ckpt,
    ):
        step(ckpt, parts)
        wait_for(lambda: server.requests)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in caplog.text
    assert "geheim" not in caplog.text + capfd.readouterr().err


def test_attributes_of_the_environment_are_sent_and_no_thread_is_started_for_them(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=gpt-0")
    begun, start = [], threading.Thread.start

    def noted(thread):
        if threading.current_thread().name == "trainckpt-metrics":
            begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    parts = tracked()
    with receiver() as server:
        with Checkpointer(tmp_path / "run", metrics=server.target, **parts) as ckpt:
            step(ckpt, parts)
        assert len(server.requests) == 2
    assert server.attributes == {"k8s.pod.name": "gpt-0", "service.name": "trainckpt"}
    assert begun == []


def test_no_connection_stays_open_between_two_requests(tmp_path):
    """A loader worker would inherit it, and a process dump would meet it."""
    parts = tracked()
    with receiver() as server:
        with Checkpointer(tmp_path / "run", metrics=server.target, **parts) as ckpt:
            step(ckpt, parts)
        assert server.connections == {"close"}


@pytest.mark.parametrize(("status", "why"), [(400, "Bad Request"), (503, "Service Unavailable")])
def test_a_receiver_that_refuses_is_named_once_and_training_goes_on(
    tmp_path,
    caplog,
    monkeypatch,
    status,
    why,
):
    monkeypatch.setattr(publisher, "PUBLISH_EVERY_S", 0.01)
    parts = tracked()
    with (
        receiver(refuses=status) as server,
        Checkpointer(tmp_path / "run", metrics=server.target, **parts) as ckpt,
    ):
        step(ckpt, parts)
        wait_for(lambda: len(server.requests) > 2)
    (warning,) = warnings(caplog)
    assert f"127.0.0.1:{server.server_port}" in warning
    assert "4318" in warning
    assert why in warning
    others = [r for r in caplog.records if r.name.startswith("opentelemetry")]
    assert [record.message for record in others] == []
    assert (tmp_path / "run" / "snapshots").is_dir()


def test_a_receiver_that_recovered_and_refuses_again_is_named_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(publisher, "PUBLISH_EVERY_S", 0.01)
    parts = tracked()
    with receiver() as server, Checkpointer(tmp_path / "run", metrics=server.target, **parts) as c:
        step(c, parts)
        for number in (1, 2):
            server.refuses = 400
            wait_for(lambda: len(warnings(caplog)) == number)  # noqa: B023 - of this round
            server.refuses, sent = None, len(server.requests)
            wait_for(lambda: len(server.requests) > sent + 2)  # noqa: B023 - likewise
    assert len(warnings(caplog)) == 2


def test_secrets_of_the_collectors_url_are_in_no_log(tmp_path, caplog):
    parts = tracked()
    where = f"otlp:http://user:geheim@127.0.0.1:{free_port()}/?k=geheim2"
    with Checkpointer(tmp_path / "run", metrics=where, **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: warnings(caplog))
    assert "geheim" not in caplog.text
    texts = [path.read_text() for path in (tmp_path / "run").rglob("*.json")]
    assert not any("geheim" in text for text in texts)


@pytest.mark.parametrize("kind", ["nobody listens", "nobody answers"])
def test_a_dead_collector_holds_up_the_end_no_longer_than_its_limit(
    tmp_path,
    caplog,
    kind,
):
    parts = tracked()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1] if kind == "nobody answers" else free_port()
        where = f"otlp:http://127.0.0.1:{port}"
        with Checkpointer(tmp_path / "run", metrics=where, **parts) as ckpt:
            step(ckpt, parts)
            ckpt.save()
            step(ckpt, parts)
            begun_s = time.monotonic()
            ckpt._listener.metrics.close()
            took_s = time.monotonic() - begun_s
    assert took_s < publisher.END_WITHIN_S + 2
    assert torch.isfinite(parts["model"].weight).all()
    assert logging.getLogger("opentelemetry").filters == []


def test_a_collector_that_does_not_answer_costs_no_stop_its_deadline(tmp_path):
    parts = tracked()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"otlp:http://127.0.0.1:{silent.getsockname()[1]}"
        with Checkpointer(tmp_path / "run", metrics=where, **parts) as ckpt:
            step(ckpt, parts)
            begun_s = time.monotonic()
            ckpt._listener.metrics.close(left_s=0.0)
            took_s = time.monotonic() - begun_s
    assert took_s < publisher.END_WITHIN_S


def test_a_run_whose_collector_does_not_answer_stops_in_time(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"otlp:http://127.0.0.1:{silent.getsockname()[1]}"
        with living(tmp_path / "run", metrics=where, grace="5 s") as process:
            os.kill(process.pid, signal.SIGTERM)
            process.join(60)
            assert process.exitcode == 75
