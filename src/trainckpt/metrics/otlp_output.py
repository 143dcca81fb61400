"""Send readings to an OpenTelemetry collector, by OTLP over HTTP.

OpenTelemetry's exporter encodes and sends; the values are given to it as its SDK has them. Its
meters, readers and `Resource.create` are not used: each would start threads. No connection is kept
between two requests, for a forked loader worker or a process dump to find.

The exporter draws random numbers before each request, and logs each failure. Here it draws from a
generator of its own, and what it logs becomes part of the publisher's one warning.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

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
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from trainckpt.attempt.duration_histogram import BOUNDS_S, HistogramCounts
from trainckpt.attempt.log import logger
from trainckpt.format.names import VERSION
from trainckpt.metrics.metric_table import COUNTER, HISTOGRAM
from trainckpt.metrics.publisher import MetricsUnpublished
from trainckpt.storage.client_libraries import give_own_randomness
from trainckpt.storage.redact import REDACTED, redact_text, redacted

if TYPE_CHECKING:
    from trainckpt.metrics.run_readings import Reading, RunReadings, Value

SENT_WITHIN_S = 5.0  # with all tries; a collector that sends its answer bit by bit takes longer
NANO = 10**9
HEADERS_LOGGER = "opentelemetry.util.re"  # it quotes a header that it cannot read
NOT_KEPT: Any = None  # the encoder leaves it out


class OtlpSink:
    """Pushes the metrics of one attempt. Publisher's thread."""

    def __init__(self, url: str, readings: RunReadings) -> None:
        self._url, self._readings = url, readings
        self._log = _ExporterLog()
        self._exporter = OTLPMetricExporter(
            endpoint=url, timeout=SENT_WITHIN_S, headers={"connection": "close"}
        )
        if self._log.messages:  # they quote the header
            logger.warning(
                "metrics are sent without a header of OTEL_EXPORTER_OTLP_HEADERS or "
                "OTEL_EXPORTER_OTLP_METRICS_HEADERS: it is not name=value. Several are separated "
                "by commas"
            )
        give_own_randomness()
        service = Resource({"service.name": "trainckpt"})
        self._resource = OTELResourceDetector().detect().merge(service)

    def publish(self) -> None:
        """Send the values now.

        Raises:
            MetricsUnpublished: the collector does not answer, or refuses them.
        """
        self._log.messages.clear()
        result = self._exporter.export(metrics_data(self._readings, self._resource))
        if result is not MetricExportResult.SUCCESS:
            url, query = redact_text(redacted(self._url)), urlsplit(self._url).query
            why = next(iter(self._log.messages), "no reason was given")
            why = why.replace(query, REDACTED) if query else why
            raise MetricsUnpublished(
                f"the collector at {url} does not take them: {why}",
                hint="look whether its OTLP receiver listens there for HTTP, by default on port "
                "4318, and what its log says",
            )

    def close(self) -> None:
        """Close what the exporter holds."""
        self._exporter.shutdown()
        self._log.close()


class _ExporterLog:
    """Keep what the exporter logs on this thread, instead of showing it.

    Attributes:
        messages: Those since the publisher cleared them.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._thread = threading.get_ident()
        self._loggers = [logging.getLogger(n) for n in (metric_exporter.__name__, HEADERS_LOGGER)]
        for each in self._loggers:
            each.addFilter(self._is_others)

    def close(self) -> None:
        """Let everything be logged again."""
        for each in self._loggers:
            each.removeFilter(self._is_others)

    def _is_others(self, record: logging.LogRecord) -> bool:
        is_own = record.thread == self._thread
        if is_own:
            self.messages.append(record.getMessage())
        return not is_own


def metrics_data(readings: RunReadings, resource: Resource) -> MetricsData:
    """Return all values as of now."""
    labels, now_ns = readings.labels, time.time_ns()
    begun_ns = min(int(readings.begun_unix_s * NANO), now_ns)
    metrics = [_metric(reading, labels, begun_ns, now_ns) for reading in readings.read()]
    scope = ScopeMetrics(InstrumentationScope("trainckpt", VERSION), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(reading: Reading, labels: dict[str, str], begun_ns: int, now_ns: int) -> Metric:
    metric = reading.metric

    data: Gauge | Histogram | Sum
    if metric.kind == HISTOGRAM:
        histograms = [
            _histogram_point(value, metric.labelled(labels, own), begun_ns, now_ns)
            for own, value in reading.values
            if isinstance(value, HistogramCounts)
        ]
        data = Histogram(histograms, AggregationTemporality.CUMULATIVE)
    else:
        points = [
            NumberDataPoint(metric.labelled(labels, own), begun_ns, now_ns, _number(value))
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
