"""The option `metrics`: what it takes, and what it refuses."""

from __future__ import annotations

import pytest

from trainckpt.attempt.metrics_target import HTTP, OTLP, TEXTFILE, parse_metrics_target
from trainckpt.attempt.options import read_options
from trainckpt.errors import ConfigurationError
from trainckpt.metrics import publisher


@pytest.mark.parametrize(
    ("text", "kind", "address", "port"),
    [
        ("textfile:/var/lib/x", TEXTFILE, "/var/lib/x", 0),
        ("http:127.0.0.1:9464", HTTP, "127.0.0.1", 9464),
        ("http:9464", HTTP, "127.0.0.1", 9464),
        ("http://127.0.0.1:9464/metrics", HTTP, "127.0.0.1", 9464),
        ("http:[::1]:9464", HTTP, "::1", 9464),
        ("http:0.0.0.0:0", HTTP, "0.0.0.0", 0),
        ("http:node7.cluster:9464", HTTP, "node7.cluster", 9464),
        ("otlp:http://c:4318", OTLP, "http://c:4318/v1/metrics", 0),
        ("otlp:https://c/x/", OTLP, "https://c/x/v1/metrics", 0),
        ("otlp:https://c/v1/metrics", OTLP, "https://c/v1/metrics", 0),
    ],
)
def test_a_place_for_metrics(text, kind, address, port):
    target = parse_metrics_target(text)
    assert (target.kind, target.address, target.port) == (kind, address, port)
    assert parse_metrics_target(target) is target


@pytest.mark.parametrize(
    "text",
    [
        "textfile:",
        "textfile",
        "http:",
        "http:65536",
        "http:a b:1",
        "otlp:c:4318",
        "otlp:",
        "otlp:http://c:99999",
        "otlp:http://c:0",
        "otlp:http://[::1",
        "otlp:http://:4318",
        "statsd:x",
    ],
)
def test_what_is_no_place_is_refused_with_the_places_there_are(text):
    with pytest.raises(ConfigurationError, match="otlp:http://host:4318"):
        read_options({"metrics": text}, {})


def test_nothing_is_published_unless_asked_for(tmp_path):
    assert read_options({}, {}).metrics is None
    assert read_options({}, {"TRAINCKPT_METRICS": "none"}).metrics is None
    (tmp_path / "trainckpt.toml").write_text('metrics = "http:9464"')
    assert read_options({}, {}, tmp_path).metrics.port == 9464


def test_secrets_of_a_collector_are_not_shown():
    target = parse_metrics_target("otlp:https://user:geheim@c:4318?token=geheim")
    assert "geheim" not in target.text + repr(target)
    assert "geheim" in target.address


def test_secrets_of_an_option_that_is_refused_are_not_shown():
    with pytest.raises(ConfigurationError) as caught:
        read_options({"metrics": "otlp:grpc://user:geheim@c:4317?token=geheim"}, {})
    assert "grpc://c:4317" in caught.value.message
    assert "geheim" not in caught.value.message


def test_a_missing_library_is_refused_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(publisher.NEEDS, HTTP, ("no_such_library", "metrics"))
    with pytest.raises(ConfigurationError) as caught:
        publisher.check(parse_metrics_target("http:9464"))
    assert "pip install 'trainckpt[metrics]'" in caught.value.hint
    publisher.check(None)
