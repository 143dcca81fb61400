"""A real Prometheus scrapes real runs: the rules fire, and every panel of the dashboard has data.

Prometheus and node_exporter come from Debian, by `make test-long` (`tests/metrics/install.sh`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.metrics.scraping import free_port, scrape
from tests.metrics.test_documents import ALERTS, RULES, expressions
from trainckpt.metrics.metric_table import METRICS

UNPACKED = Path(sys.executable).parent.parent / "prometheus" / "usr" / "bin"
WITHIN_S = 120.0
SCRAPE = "200ms"
SILENT = "TrainckptAttemptSilent"
NOT_READY = 503
pytestmark = pytest.mark.long


def program(name):
    path = shutil.which(name, path=f"{UNPACKED}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not here (`make test-long` gets it from Debian)")
    return path


def checked(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until(condition):
    """The first result that counts as true."""
    end = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


# ---- promtool


def test_promtool_finds_nothing_wrong_with_the_rules():
    assert f"{len(ALERTS)} rules found" in checked(
        program("promtool"), "check", "rules", str(RULES)
    )


def test_promtool_sees_each_alert_fire_when_it_should_and_not_before():
    cases = Path(__file__).with_name("trainckpt.rules.test.yml")
    assert all(f"alertname: {alert}" in cases.read_text() for alert in ALERTS)
    checked(program("promtool"), "test", "rules", str(cases))


def test_promtool_finds_nothing_wrong_with_the_text_of_an_endpoint(tmp_path):
    port = free_port()
    with training(tmp_path / "run", f"metrics=http:{port}", "every=2 steps"):
        text = until(lambda: scrape(port))
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- a server


@contextlib.contextmanager
def training(run, *options, memory="none"):
    """A run in a process of its own until the block is over; `memory`: where it may keep saves."""
    clean = {name: value for name, value in os.environ.items() if "TRAINCKPT" not in name}
    script = str(Path(__file__).with_name("metered.py"))
    process = subprocess.Popen(
        [sys.executable, script, str(run), *options],
        env={**clean, "TRAINCKPT_MEMORY": memory},
        cwd=run.parent,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stop(process):
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


class Server:
    """A Prometheus that scrapes these ports."""

    def __init__(self, folder, *ports):
        self.port = free_port()
        targets = [f"127.0.0.1:{port}" for port in ports]
        # The intervals of the rules would be minutes; all else is as it is shipped.
        rules = re.sub(r"for: \w+", "for: 1s", RULES.read_text())
        rules = rules.replace("> 300", "> 20").replace("< 120", "< 20")
        (folder / "rules.yml").write_text(rules)
        config = {
            "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "training", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=error",
            ]
        )

    def get(self, path, **query):
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code != NOT_READY:
                raise AssertionError(error.read().decode()) from None
            return {}
        except OSError:
            assert self.process.poll() is None
            return {}

    def query(self, expression):
        return self.get("query", query=expression).get("result", [])

    def firing(self, run):
        alerts = self.get("alerts").get("alerts", [])
        return {
            alert["labels"]["alertname"]
            for alert in alerts
            if alert["state"] == "firing" and alert["labels"]["run"] == str(run)
        }


@contextlib.contextmanager
def prometheus(folder, *ports):
    folder.mkdir()
    server = Server(folder, *ports)
    try:
        until(lambda: server.query("up"))
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def test_every_query_of_the_dashboard_has_data_and_a_healthy_run_no_alert(tmp_path):
    run, port = tmp_path / "run", free_port()
    options = (f"metrics=http:{port}", f"tiers={tmp_path / 'far'}", "grace=60 s")
    memory = os.environ["TRAINCKPT_MEMORY"]
    with prometheus(tmp_path / "server", port) as server:
        with training(run, "every=1 s", *options, memory=memory) as process:
            until(lambda: value(server, 'trainckpt_last_durable_step{tier="far"}'))
            stop(process)
        with training(run, "every=20 s", *options, memory=memory) as process:
            until(lambda: value(server, 'trainckpt_resumes_total{reason="stopped"}'))
            until(lambda: not without_data(server, expressions()))
            names = {each["metric"]["__name__"] for each in server.query('{job="training"}')}
            assert server.firing(run) == set()
            stop(process)
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in names}
    assert {metric.name for metric in METRICS} <= families


def value(server, expression):
    """True once one of its series is above 0."""
    return any(float(each["value"][1]) for each in server.query(expression))


def without_data(server, queries):
    """The queries of the dashboard that have no data now, as Grafana would ask them."""
    replaced = {"$__rate_interval": "60s", "$run": ".*"}
    found = []
    for query in queries:
        asked = query
        for name, text in replaced.items():
            asked = asked.replace(name, text)
        values = [float(each["value"][1]) for each in server.query(asked)]
        if not values or all(map(math.isnan, values)):
            found.append(query)
    return found


def test_each_alert_fires_in_a_run_that_deserves_it(tmp_path):
    run, far, port = tmp_path / "run", tmp_path / "far", free_port()
    options = ("every=1 s", f"metrics=http:{port}", f"tiers={far}")
    with prometheus(tmp_path / "server", port) as server:
        with training(run, *options) as process:
            until(lambda: value(server, 'trainckpt_last_durable_step{tier="far"}'))
            stop(process)
        newest = max(run.glob("snapshots/*/*.safetensors"), key=lambda path: path.stat().st_mtime)
        data = bytearray(newest.read_bytes())
        data[-8] ^= 1
        newest.write_bytes(data)  # the copy in the other tier is whole
        with training(run, *options):
            until(lambda: "TrainckptVerifyFailed" in server.firing(run))
            far.rename(tmp_path / "lost")
            far.write_text("no folder")
            until(lambda: "TrainckptCopiesLag" in server.firing(run))
            (run / "snapshots").rename(tmp_path / "aside")
            (run / "snapshots").write_text("no folder")
            until(lambda: server.firing(run) == {*ALERTS} - {SILENT})


def test_a_killed_attempt_that_node_exporter_still_tells_of_is_silent_until_another_one_runs(
    tmp_path,
):
    run, folder, port = tmp_path / "run", tmp_path / "textfile", free_port()
    folder.mkdir()
    options = ("every=2 s", f"metrics=textfile:{folder}")
    with node_exporter(folder, port), prometheus(tmp_path / "server", port) as server:
        with training(run, *options):
            until(lambda: value(server, 'trainckpt_running{attempt="1"}'))
            until(lambda: list(run.glob("snapshots/*/manifest.json")))
        until(lambda: server.firing(run) == {SILENT})
        assert value(server, "node_textfile_scrape_error == bool 0")
        with training(run, *options) as process:
            until(lambda: value(server, 'trainckpt_running{attempt="2"}'))
            until(lambda: server.firing(run) == set())
            stop(process)
        until(lambda: server.query('trainckpt_running{attempt="2"} == 0'))
        assert server.firing(run) == set()


@contextlib.contextmanager
def node_exporter(folder, port):
    """A node_exporter with nothing but its textfile collector."""
    process = subprocess.Popen(
        [
            program("prometheus-node-exporter"),
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={folder}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        until(lambda: scrape(port))
        yield
    finally:
        process.terminate()
        process.wait()
