"""A metadata server on this machine that speaks what the three clouds document.

Each part refuses what the real one refuses: AWS a request without a token that it gave, GCE and
Azure one without their header. A test says what there is to be told, and can make the server ill.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

AHEAD_S = 5_000_000  # its clock is that far from this machine's


class Cloud:
    """What the server is to say.

    Attributes:
        tokens: Those that AWS' part has given and still takes; None: it refuses to give any.
        action: AWS' spot notice, if there is one.
        preempted: GCE's value.
        events: Azure's list.
        ill: Answer everything with these bytes, as they are.
        asked: Method and path of every request.
    """

    def __init__(self) -> None:
        self.tokens: list[str] | None = []
        self.action: str | None = None
        self.preempted = "FALSE"
        self.events: Any = []
        self.name = "worker_7"
        self.ill: bytes | None = None
        self.asked: list[str] = []
        self.changed = threading.Condition()
        self.url = ""

    def preempt(self) -> None:
        """GCE's value changes, and whoever waits for that is told."""
        with self.changed:
            self.preempted = "TRUE"
            self.changed.notify_all()

    def now(self) -> float:
        return time.time() + AHEAD_S

    def aws_time(self, in_s: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.now() + in_s))

    def azure_time(self, in_s: float) -> str:
        return formatdate(self.now() + in_s, usegmt=True)


@contextlib.contextmanager
def serving() -> Iterator[Cloud]:
    cloud = Cloud()
    handler = type("Bound", (Handler,), {"cloud": cloud})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    cloud.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    cloud: Cloud

    def do_PUT(self) -> None:
        cloud = self._note()
        lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if cloud.ill is None and self.path == "/latest/api/token" and cloud.tokens is not None:
            if not lifetime.isdecimal() or not 1 <= int(lifetime) <= 21600:
                self._say(400)
                return
            cloud.tokens.append(f"token-{len(cloud.asked)}==")
            self._say(200, cloud.tokens[-1])
        else:
            self._say(403)

    def do_GET(self) -> None:
        cloud = self._note()
        path = urlsplit(self.path)
        if cloud.ill is not None:
            self._say(0)
        elif path.path == "/latest/meta-data/spot/instance-action":
            self._aws(cloud)
        elif path.path == "/computeMetadata/v1/instance/preempted":
            self._gce(cloud, parse_qs(path.query))
        elif path.path.startswith("/metadata/"):
            self._azure(cloud, path.path, parse_qs(path.query))
        else:
            self._say(404)

    def _aws(self, cloud: Cloud) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") not in (cloud.tokens or []):
            self._say(401)
        elif cloud.action is None:
            self._say(404, "<html>Not Found</html>")
        else:
            self._say(200, cloud.action)

    def _gce(self, cloud: Cloud, query: dict[str, list[str]]) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._say(403)
            return
        with cloud.changed:
            etag = f"e{len(cloud.preempted)}"
            if query.get("wait_for_change") == ["true"] and query.get("last_etag") == [etag]:
                cloud.changed.wait(float(query["timeout_sec"][0]))
            self._say(200, cloud.preempted, f"e{len(cloud.preempted)}")

    def _azure(self, cloud: Cloud, path: str, query: dict[str, list[str]]) -> None:
        if self.headers.get("Metadata") != "true" or "api-version" not in query:
            self._say(400)
        elif path == "/metadata/instance/compute/name":
            self._say(200, cloud.name)
        elif path == "/metadata/scheduledevents":
            self._say(200, json.dumps({"DocumentIncarnation": 1, "Events": cloud.events}))
        else:
            self._say(404)

    def _note(self) -> Cloud:
        self.cloud.asked.append(f"{self.command} {self.path}")
        return self.cloud

    def _say(self, status: int, text: str = "", etag: str = "") -> None:
        with contextlib.suppress(OSError):  # whoever asked may have gone
            if self.cloud.ill is not None:
                self.wfile.write(self.cloud.ill)
                return
            self.send_response_only(status)
            self.send_header("Date", formatdate(self.cloud.now(), usegmt=True))
            if etag:
                self.send_header("ETag", etag)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""
