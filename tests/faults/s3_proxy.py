"""A proxy before an S3 server that does something wrong with the n-th request.

drop         the connection is closed before the server hears of it
lose         the server does it, and the connection is closed before its answer
200, 302, 401, 403, 500, 503, 507   is answered, and the server does not hear of it
cut          half of the answer, then the connection is closed
slow         the request goes on after a while
hold         nothing happens until `let_go` is called; then all goes on as if nothing had been

It never says "100 Continue", as servers need not of a request that they refuse unread. `skew_s`
moves the clock that answers show.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DROP, LOSE, CUT, HOLD, SLOW = "drop", "lose", "cut", "hold", "slow"
SLOW_S = 0.4
CODES = {
    200: "Page",
    302: "Elsewhere",
    401: "Unauthorized",
    403: "AccessDenied",
    500: "InternalError",
    503: "SlowDown",
    507: "InsufficientStorage",
}
_HOP = {"connection", "keep-alive", "transfer-encoding"}


class Proxy(ThreadingHTTPServer):
    """Requests are numbered from 1; `reset` begins anew.

    Attributes:
        requests: (method, path) of each, in the order in which they came.
        skew_s: The server's clock, in seconds before that of this machine.
    """

    daemon_threads = True

    def __init__(self, behind):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.port = behind, self.server_address[1]
        self.requests, self.sent_bytes, self.skew_s = [], 0, 0.0
        self._lock = threading.Lock()
        self._fault = lambda number: None
        self._let_go = threading.Event()

    def reset(self, fault=lambda number: None):
        """`fault`: number of a request -> what goes wrong with it, or None."""
        with self._lock:
            self.requests, self.sent_bytes, self._fault = [], 0, fault

    def hold(self):
        """Let no request through from now on."""
        self._let_go.clear()
        self.reset(lambda _: HOLD)

    def let_go(self):
        """All that are held, and all that come."""
        self.reset()
        self._let_go.set()

    def wait(self):
        """Until it may go on."""
        self._let_go.wait()

    def fault_of(self, method, path):
        with self._lock:
            self.requests.append((method, path))
            return self._fault(len(self.requests))

    def sends(self, num_bytes):
        with self._lock:
            self.sent_bytes += num_bytes

    def handle_error(self, request, client_address):
        """Clients that hang up are what this is about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_expect_100(self):
        """Whoever waits for more than this waits for ever."""
        return True

    def _relay(self):
        body = self._body()
        fault = self.server.fault_of(self.command, self.path)
        if fault == DROP:
            return self._hang_up()
        if fault in CODES:
            return self._refuse(fault)
        if fault == HOLD:
            self.server.wait()
        if fault == SLOW:
            time.sleep(SLOW_S)
        server = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            headers.setdefault("Content-Length", str(len(body)))
            headers.pop("Expect", None)
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                server.putheader(name, value)
            server.endheaders(body)
            answer = server.getresponse()
            data = answer.read()
        finally:
            server.close()
        if fault == LOSE:
            return self._hang_up()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP | {"content-length", "date", "server"}:
                self.send_header(name, self._shifted(name, value))
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        if length is not None and answer.status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == CUT else data)
        self.server.sends(len(data))
        return self._hang_up() if fault == CUT else None

    def date_time_string(self, timestamp=None):
        """As the skewed clock shows it."""
        now = time.time() if timestamp is None else timestamp
        return formatdate(now + self.server.skew_s, usegmt=True)

    def _shifted(self, name, value):
        if not self.server.skew_s or name.lower() != "last-modified":
            return value
        return self.date_time_string(parsedate_to_datetime(value).timestamp())

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while length := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _refuse(self, status):
        text = f"<Error><Code>{CODES[status]}</Code><Message>as told</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _hang_up(self):
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_):
        pass


for _method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
    setattr(_Handler, f"do_{_method}", _Handler._relay)


@contextmanager
def proxy(behind):
    """A proxy before the server at this port of 127.0.0.1."""
    server = Proxy(behind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.let_go()
        server.shutdown()
        thread.join()
        server.server_close()
