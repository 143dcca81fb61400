"""The table of docs/metrics.md is the table of the code."""

from __future__ import annotations

import re

from tests.test_docs import ROOT, rows
from trainckpt.attempt.goodput import BUCKETS, TRAINING
from trainckpt.errors import SaveFailed
from trainckpt.metrics.metric_table import METRICS
from trainckpt.metrics.run_readings import ENDS

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
    assert all(len(re.findall(r"^- \*\*`tier`\*\*", PAGE, re.MULTILINE)) == 1 for _ in "1")
    format_page = (ROOT / "docs/format.md").read_text(encoding="utf-8")
    assert all(bucket in format_page for bucket in BUCKETS if bucket != TRAINING)
