"""Parse where a run publishes its metrics: the option `metrics`.

textfile:/var/lib/node_exporter    a .prom file there, for node_exporter's textfile collector
http:127.0.0.1:9464                an endpoint that Prometheus scrapes; http:9464 is the same
otlp:http://collector:4318         pushed to an OpenTelemetry collector
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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
        address: Folder, host to listen on, or URL to send to.
        port: Port to listen on; 0: any free one.
    """

    kind: str
    text: str
    address: str
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
        return MetricsTarget(kind, text, rest)
    if kind == HTTP and (match := _HTTP.fullmatch(rest)) and int(match[2]) <= MOST_PORT:
        host = (match[1] or LOOPBACK).strip("[]")
        return MetricsTarget(kind, text, host, int(match[2]))
    url = urlsplit(rest)
    if kind == OTLP and url.scheme in ("http", "https") and url.hostname:
        path = url.path.rstrip("/")
        if not path.endswith(OTLP_PATH):
            path += OTLP_PATH
        shown = redact_text(redacted(text))
        return MetricsTarget(kind, shown, url._replace(path=path).geturl())
    raise ValueError(text)
