"""Parse where a run publishes its metrics: the option `metrics`.

textfile:/var/lib/node_exporter    a .prom file there, for node_exporter's textfile collector
http:127.0.0.1:9464                an endpoint that Prometheus scrapes; http:9464 is the same
otlp:http://collector:4318         pushed to an OpenTelemetry collector
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trainckpt.storage.redact import redact_text, redacted

TEXTFILE, HTTP, OTLP = "textfile", "http", "otlp"
LOOPBACK = "127.0.0.1"
OTLP_PATH = "/v1/metrics"
MOST_PORT = 65535
_HTTP = re.compile(r"(?://)?(?:(\[[0-9a-fA-F:.]+\]|[\w.-]+):)?(\d{1,5})(?:/(?:metrics)?)?")


@dataclass(frozen=True)
class MetricsTarget:
    """One place for metrics.

    Attributes:
        kind: `TEXTFILE`, `HTTP` or `OTLP`.
        text: The option as typed, without secrets.
        address: Folder, as a whole path; host to listen on; or URL to send to.
        port: Port to listen on; 0: any free one.
    """

    kind: str
    text: str
    address: str = field(repr=False)  # may hold a secret
    port: int = 0


def parse_metrics_target(value: object) -> MetricsTarget:
    """Return the target that an option names.

    Raises:
        ValueError: it names none.
    """
    if isinstance(value, MetricsTarget):
        return value
    text = str(value).strip()
    kind, _, rest = text.partition(":")
    if kind == TEXTFILE and rest:
        # The script may change its working directory later.
        return MetricsTarget(kind, text, os.path.abspath(os.path.expanduser(rest)))  # noqa: PTH100, PTH111
    if kind == HTTP and (match := _HTTP.fullmatch(rest)) and int(match[2]) <= MOST_PORT:
        host = (match[1] or LOOPBACK).strip("[]")
        return MetricsTarget(kind, text, host, int(match[2]))
    url = urlsplit(rest)
    has_host = bool(url.hostname) and url.port != 0  # which raises beyond the largest port
    if kind == OTLP and url.scheme in ("http", "https") and has_host:
        path = url.path.rstrip("/")
        if not path.endswith(OTLP_PATH):
            path += OTLP_PATH
        shown = redact_text(redacted(text))
        return MetricsTarget(kind, shown, url._replace(path=path).geturl())
    raise ValueError(text)
