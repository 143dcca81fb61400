"""The pages, rules and dashboard name metrics that there are; each alert has a section."""

from __future__ import annotations

import json
import re

import yaml

from tests.test_docs import ROOT, rows
from trainckpt.attempt.goodput import BUCKETS, TRAINING
from trainckpt.errors import SaveFailed
from trainckpt.metrics.metric_table import METRICS
from trainckpt.metrics.run_readings import ENDS

RULES = ROOT / "configs/prometheus/trainckpt.rules.yml"
DASHBOARD = ROOT / "configs/grafana/trainckpt.json"
ALERTS = [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_the_table_of_metrics_is_the_table_of_the_code():
    found = {
        row[0].strip("`"): (row[1], row[2].strip("`"))
        for row in rows("docs/metrics.md")
        if row[0].startswith("`trainckpt_")
    }
    assert found == {metric.name: (metric.kind, metric.label) for metric in METRICS}


def test_the_values_of_labels_are_listed():
    assert all(f"`{kind}`" in PAGE for kind in (*SaveFailed.KINDS, *ENDS))
    format_page = (ROOT / "docs/format.md").read_text(encoding="utf-8")
    assert all(bucket in format_page for bucket in BUCKETS if bucket != TRAINING)


# ---- rules and dashboard


def expressions():
    """The queries of the dashboard."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_rules_and_dashboard_name_metrics_that_there_are():
    known = {metric.name for metric in METRICS}
    texts = [RULES.read_text(encoding="utf-8"), *expressions()]
    for name in re.findall(r"\btrainckpt_\w+", "\n".join(texts)):
        assert name in known or re.sub("_(bucket|sum|count)$", "", name) in known


def test_the_dashboard_shows_every_metric_and_depends_on_no_data_source_of_ours():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    text = "\n".join(expressions())
    assert [metric.name for metric in METRICS if metric.name not in text] == []
    sources = re.findall(r'"uid": "([^"]+)"', json.dumps(dashboard["panels"]))
    assert set(sources) == {"$datasource"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert {each["name"] for each in dashboard["templating"]["list"]} == {"datasource", "run"}


def test_each_alert_links_to_what_to_do_about_it():
    page = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert rule["annotations"]["runbook"] == f"docs/operating.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert']}\n" in page
    assert re.findall(r"^### (Trainckpt\w+)$", page, re.MULTILINE) == ALERTS
