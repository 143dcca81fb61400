"""Give readings to Prometheus: as a file for node_exporter, or at an HTTP endpoint.

`prometheus_client` makes the text of both; nothing of its own registry is used.

    PromFile      RUN.prom in the folder of node_exporter's textfile collector, replaced atomically.
                  As open to readers as that folder, and writable by this user alone
    HttpEndpoint  one listening socket, and one request at a time on the caller's thread. A process
                  that the script forks closes its copies of the sockets
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import selectors
import socket
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from trainckpt.attempt.duration_histogram import BOUNDS_S, HistogramCounts
from trainckpt.metrics.metric_table import COUNTER
from trainckpt.metrics.unpublished import MetricsUnpublished
from trainckpt.ranks.threads import SelfPipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric as Family

    from trainckpt.metrics.run_readings import Reading, RunReadings

REQUEST_WITHIN_S = 5.0  # a client that sends and reads no faster is cut off
READABLE = stat.S_IRGRP | stat.S_IROTH
NAME_LENGTH = 60


class RunCollector:
    """The readings as `prometheus_client` collects them, each time anew."""

    def __init__(self, readings: RunReadings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Family]:
        """Yield each metric with its values."""
        labels = self._readings.labels
        for reading in self._readings.read():
            yield _family(reading, labels)


def _family(reading: Reading, labels: dict[str, str]) -> Family:
    metric = reading.metric
    kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    histogram = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
    plain = kind(metric.name, metric.text, labels=metric.labels)
    for own, value in reading.values:
        of_value = [*labels.values(), own] if metric.label else list(labels.values())
        if isinstance(value, HistogramCounts):
            histogram.add_metric(of_value, _buckets(value), value.sum_s)
        else:
            plain.add_metric(of_value, value)
    return histogram if histogram.samples else plain


def _buckets(counts: HistogramCounts) -> list[tuple[str, float]]:
    """Return the buckets as Prometheus has them: each counts all below its bound."""
    found, total = [], 0
    for bound, number in zip((*map(str, BOUNDS_S), "+Inf"), counts.counts, strict=True):
        total += number
        found.append((bound, float(total)))
    return found


def _registry(readings: RunReadings) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(cast("Any", RunCollector(readings)))  # it needs no more than `collect`
    return registry


class PromFile:
    """The file of one run. Publisher's thread."""

    def __init__(self, folder: str, readings: RunReadings, run: str) -> None:
        """`run`: the run's place; the file is named after it."""
        self._registry = _registry(readings)
        self._path = Path(folder) / prom_file_name(run)

    def publish(self) -> None:
        """Write the file.

        Raises:
            MetricsUnpublished: the folder cannot be written.
        """
        data, path = generate_latest(self._registry), self._path
        # node_exporter reads `*.prom` alone.
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        try:
            mode = stat.S_IRUSR | stat.S_IWUSR | path.parent.stat().st_mode & READABLE
            self._remove_left_over()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise MetricsUnpublished(
                f"{path} cannot be written: {error.strerror or error}",
                hint=f"make the folder {path.parent} one that this user may write to, the one of "
                "node_exporter's --collector.textfile.directory",
            ) from error

    def _remove_left_over(self) -> None:
        """Remove what a process left that was killed in the middle of a write."""
        for path in self._path.parent.glob(f".{self._path.name}.*.tmp"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the file: its last values say that the attempt is over."""


def prom_file_name(run: str) -> str:
    """Return the name of a run's file: two runs of one name have different ones."""
    words = re.sub(r"[^A-Za-z0-9_-]+", "-", run.rstrip("/").rpartition("/")[2])[:NAME_LENGTH]
    return f"trainckpt-{words}-{hashlib.sha256(run.encode()).hexdigest()[:8]}.prom"


# ---- the endpoint


class _Server(WSGIServer):
    """One request at a time; its sockets are known, so that a forked process can close them."""

    request_queue_size = 8

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.connection: socket.socket | None = None
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        self.connection = connection
        return connection, address

    def close_request(self, request: Any) -> None:
        """Close it after the answer."""
        self.connection = None
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hung up."""

    def forget(self) -> None:
        """Close the copies of a forked process: nothing is sent, and the parent's stay open."""
        for each in (self.connection, self.socket):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.close()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_WITHIN_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        """Log nothing: a scrape comes every few seconds."""


class HttpEndpoint:
    """The endpoint of one attempt.

    Attributes:
        address: Host and port, once it is open.
    """

    def __init__(self, host: str, port: int, readings: RunReadings) -> None:
        self._host, self._port = host, port
        self._app = make_wsgi_app(_registry(readings))
        self._server: _Server | None = None
        self._pipe = SelfPipe()
        self.address = ""

    def open(self) -> bool:
        """Listen; return False if it does already. Publisher's thread.

        Raises:
            MetricsUnpublished: the address is taken, or not this host's.
        """
        if self._server is not None:
            return False
        try:
            self._server = server = _Server(self._host, self._port)
        except OSError as error:
            raise MetricsUnpublished(
                f"cannot listen on {self._host} port {self._port}: {error.strerror or error}",
                hint='give this run a port of its own, such as metrics="http:'
                f'{self._host}:{self._port + 1}", and add it to Prometheus',
            ) from error
        server.set_app(self._app)
        server.timeout = 0
        _open_servers.add(server)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"{host}:{server.server_port}"
        return True

    def serve(self) -> None:
        """Answer requests until `wake` is called. Publisher's thread."""
        assert self._server is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            pipe = selector.register(self._pipe, selectors.EVENT_READ)
            while all(key is not pipe for key, _ in selector.select()):
                self._server.handle_request()
        self._pipe.drain()

    def wake(self) -> None:
        """Let `serve` return. Any thread."""
        self._pipe.ring()

    def close(self) -> None:
        """Close the listening socket. Publisher's thread, or after it has ended."""
        server, self._server = self._server, None
        if server is not None:
            _open_servers.discard(server)
            server.server_close()
        self._pipe.close()


_open_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


def _forked() -> None:
    for server in list(_open_servers):
        server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
