"""Send readings to an OpenTelemetry collector, by OTLP over HTTP.

OpenTelemetry's exporter encodes and sends; the values are given to it as its SDK has them. Its
meters and readers are not used: they would start a thread that a forked loader worker gets too.

The exporter draws random numbers before each request, and logs each failure. Here it draws from a
generator of its own, and the publisher logs one failure for all.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http import metric_exporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from trainckpt.attempt.duration_histogram import BOUNDS_S, HistogramCounts
from trainckpt.format.names import VERSION
from trainckpt.metrics.metric_table import COUNTER, HISTOGRAM
from trainckpt.metrics.unpublished import MetricsUnpublished
from trainckpt.storage.client_libraries import give_own_randomness
from trainckpt.storage.redact import redact_text, redacted

if TYPE_CHECKING:
    from trainckpt.metrics.run_readings import Reading, RunReadings, Value

SENT_WITHIN_S = 5.0  # with all tries
NANO = 10**9
NOT_KEPT: Any = None  # the encoder leaves it out


class OtlpSink:
    """Pushes the metrics of one attempt. Publisher's thread."""

    def __init__(self, url: str, readings: RunReadings) -> None:
        self._url, self._readings = url, readings
        self._exporter = OTLPMetricExporter(endpoint=url, timeout=SENT_WITHIN_S)
        give_own_randomness()
        own = threading.get_ident()
        self._is_others = lambda record: record.thread != own
        self._logger = logging.getLogger(metric_exporter.__name__)
        self._logger.addFilter(self._is_others)

    def publish(self) -> None:
        """Send the values now.

        Raises:
            MetricsUnpublished: the collector does not answer, or refuses them.
        """
        result = self._exporter.export(metrics_data(self._readings))
        if result is not MetricExportResult.SUCCESS:
            url = redact_text(redacted(self._url))
            raise MetricsUnpublished(
                f"the collector at {url} does not take them",
                hint="look whether its OTLP receiver listens there for HTTP, by default on port "
                "4318, and what its log says",
            )

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()
        self._logger.removeFilter(self._is_others)


def metrics_data(readings: RunReadings) -> MetricsData:
    """Return all values as of now."""
    labels, now_ns = readings.labels, time.time_ns()
    begun_ns = min(int(readings.begun_unix_s * NANO), now_ns)
    metrics = [_metric(reading, labels, begun_ns, now_ns) for reading in readings.read()]
    scope = ScopeMetrics(InstrumentationScope("trainckpt", VERSION), metrics, "")
    resource = Resource.create({"service.name": "trainckpt"})
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(reading: Reading, labels: dict[str, str], begun_ns: int, now_ns: int) -> Metric:
    metric = reading.metric

    def attributes(own: str) -> dict[str, str]:
        return {**labels, metric.label: own} if metric.label else labels

    data: Gauge | Histogram | Sum
    if metric.kind == HISTOGRAM:
        histograms = [
            _histogram_point(value, attributes(own), begun_ns, now_ns)
            for own, value in reading.values
            if isinstance(value, HistogramCounts)
        ]
        data = Histogram(histograms, AggregationTemporality.CUMULATIVE)
    else:
        points = [
            NumberDataPoint(attributes(own), begun_ns, now_ns, _number(value))
            for own, value in reading.values
        ]
        if metric.kind == COUNTER:
            data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(points)
    return Metric(metric.name, metric.text, metric.unit, data)


def _number(value: Value) -> float:
    assert not isinstance(value, HistogramCounts)
    return value


def _histogram_point(
    value: HistogramCounts, attributes: dict[str, str], begun_ns: int, now_ns: int
) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes,
        begun_ns,
        now_ns,
        count=value.count,
        sum=value.sum_s,
        bucket_counts=list(value.counts),
        explicit_bounds=list(BOUNDS_S),
        min=NOT_KEPT,
        max=NOT_KEPT,
    )
