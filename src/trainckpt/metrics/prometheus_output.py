"""Give readings to Prometheus: as a file for node_exporter, or at an HTTP endpoint.

`prometheus_client` makes the text of both; nothing of its own registry is used.

    PromFile      RUN.prom in the folder of node_exporter's textfile collector, replaced atomically.
                  As open to readers as that folder, and writable by this user alone
    HttpEndpoint  one listening socket, and one request at a time on the caller's thread, for 5 s at
                  most. A process that the script forks closes its copies of the sockets
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import selectors
import socket
import stat
import time
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
from trainckpt.attempt.metrics_target import LOOPBACK, MOST_PORT
from trainckpt.metrics.metric_table import COUNTER, GAUGE, HISTOGRAM
from trainckpt.metrics.publisher import MetricsUnpublished
from trainckpt.ranks.threads import SelfPipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric as Family

    from trainckpt.metrics.run_readings import Reading, RunReadings

REQUEST_WITHIN_S = 5.0  # a client that sends and reads no faster is cut off
READABLE = stat.S_IRGRP | stat.S_IROTH
NAME_LENGTH = 60
FAMILIES: dict[str, Any] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}


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
    family = FAMILIES[metric.kind](metric.name, metric.text, labels=metric.labels)
    for own, value in reading.values:
        labelled = list(metric.labelled(labels, own).values())
        if isinstance(value, HistogramCounts):
            family.add_metric(labelled, _buckets(value), value.sum_s)
        else:
            family.add_metric(labelled, value)
    return cast("Family", family)


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
                if hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), mode)
                file.write(data)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise MetricsUnpublished(
                f"{path} cannot be written: {error.strerror or error}",
                hint=_hint_for_folder(path.parent, error.errno),
            ) from error

    def _remove_left_over(self) -> None:
        """Remove what a process left that was killed in the middle of a write."""
        for path in self._path.parent.glob(f".{self._path.name}.*.tmp"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the file: its last values say that the attempt is over."""


def _hint_for_folder(folder: Path, code: int | None) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"free space, or quota of this user, in {folder}"
    there = "the folder of node_exporter's --collector.textfile.directory"
    if code in (errno.ENOENT, errno.ENOTDIR):
        return f'make {folder}, or name {there} in metrics="textfile:..."'
    return f"let this user write to {folder}, or name {there}, if that is another one"


def prom_file_name(run: str) -> str:
    """Return the name of a run's file: two runs of one name have different ones."""
    words = re.sub(r"[^A-Za-z0-9_-]+", "-", run.rstrip("/").rpartition("/")[2])[:NAME_LENGTH]
    digest = hashlib.sha256(run.encode(errors="surrogateescape")).hexdigest()
    return f"trainckpt-{words}-{digest[:8]}.prom"


# ---- the endpoint


class _Connection(socket.socket):
    """An accepted connection that ends at one moment, however slowly its client sends or reads."""

    def __init__(self, accepted: socket.socket, ends_s: float) -> None:
        """Take over `accepted`; `ends_s`: by the monotonic clock."""
        super().__init__(fileno=accepted.detach())
        self._ends_s = ends_s

    def recv_into(self, *arguments: Any) -> int:
        """Receive, as long as there is time left."""
        self._limit()
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        """Send, as long as there is time left."""
        self._limit()
        super().sendall(*arguments)

    def _limit(self) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the client is too slow")
        self.settimeout(left_s)


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
        accepted, address = super().get_request()
        self.connection = _Connection(accepted, time.monotonic() + REQUEST_WITHIN_S)
        return self.connection, address

    def close_request(self, request: Any) -> None:
        """Close it after the answer."""
        self.connection = None
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hung up, or was too slow."""

    def forget(self) -> None:
        """Close the copies of a forked process: nothing is sent, and the parent's stay open."""
        for each in (self.connection, self.socket):
            if each is not None:
                with contextlib.suppress(OSError):
                    os.close(each.detach())  # its files, which are open too, keep it from `close`


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        """Log nothing: a scrape comes every few seconds."""

    def get_stderr(self) -> io.StringIO:
        """Return where tracebacks go: nowhere. The publisher logs an error once."""
        return io.StringIO()


class HttpEndpoint:
    """The endpoint of one attempt.

    Attributes:
        address: Host and port, once it is open.
    """

    def __init__(
        self, host: str, port: int, readings: RunReadings, on_error: Callable[[Exception], object]
    ) -> None:
        """`on_error`: called with what fails as the values are read, on the publisher's thread."""
        self._host, self._port, self._on_error = host, port, on_error
        self._app = make_wsgi_app(_registry(readings))
        self._server: _Server | None = None
        self._pipe = SelfPipe()
        self.address = ""

    def open(self) -> None:
        """Listen. Publisher's thread.

        Raises:
            MetricsUnpublished: the address is taken, or not this host's.
        """
        host, port = self._host, self._port
        try:
            self._server = server = _Server(host, port)
        except OSError as error:
            raise MetricsUnpublished(
                f"cannot listen on {host} port {port}: {error.strerror or error}",
                hint=_hint_for_address(host, port, error.errno),
            ) from error
        server.set_app(self._answer)
        server.timeout = 0
        _open_servers.add(server)
        self.address = f"{_in_url(host)}:{server.server_port}"

    def serve(self) -> None:
        """Answer requests until `wake` is called. Publisher's thread."""
        assert self._server is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            pipe = selector.register(self._pipe, selectors.EVENT_READ)
            while all(key is not pipe for key, _ in selector.select()):
                self._server.handle_request()

    def wake(self) -> None:
        """Let `serve` return. Any thread."""
        self._pipe.ring()

    def close(self) -> None:
        """Close the listening socket. Publisher's thread."""
        server, self._server = self._server, None
        if server is not None:
            _open_servers.discard(server)
            server.server_close()
        self._pipe.close()

    def _answer(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        try:
            return cast("Iterable[bytes]", self._app(environ, start_response))
        except Exception as error:
            self._on_error(error)
            raise  # it is answered with 500


def _hint_for_address(host: str, port: int, code: int | None) -> str:
    if code == errno.EADDRINUSE:
        free = port + 1 if port < MOST_PORT else port - 1
        own = f'metrics="http:{_in_url(host)}:{free}"'
        return f"give this run a port of its own, such as {own}, and add it to Prometheus"
    if code in (errno.EACCES, errno.EPERM):
        return "name a port from 1024 on: those below belong to root"
    return f'name an address of this host, such as metrics="http:{LOOPBACK}:{port}"'


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


_open_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


def _forked() -> None:
    for server in list(_open_servers):
        server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
