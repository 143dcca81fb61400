"""Publish a run's metrics from rank 0, on one thread of its own.

    textfile, otlp    the values now, then every 15 s, and the last ones at the attempt's end
    http              whenever they are asked for, until the attempt's end

Nothing here can hurt training: what fails is logged once, with what to do, and tried again. The end
of the attempt waits for the last values, but not long.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from typing import TYPE_CHECKING, Protocol

from trainckpt.attempt.log import logger
from trainckpt.attempt.metrics_target import HTTP, OTLP, TEXTFILE
from trainckpt.errors import ConfigurationError
from trainckpt.metrics.unpublished import MetricsUnpublished

if TYPE_CHECKING:
    from trainckpt.attempt.metrics_target import MetricsTarget
    from trainckpt.metrics.prometheus_output import HttpEndpoint
    from trainckpt.metrics.run_readings import RunReadings

PUBLISH_EVERY_S = 15.0
END_WITHIN_S, SUSPEND_WITHIN_S = 3.0, 15.0
NEEDS = {  # kind -> module, and the extra that installs it
    TEXTFILE: ("prometheus_client", "metrics"),
    HTTP: ("prometheus_client", "metrics"),
    OTLP: ("opentelemetry.exporter.otlp.proto.http", "otlp"),
}
OUTPUTS = {
    TEXTFILE: "trainckpt.metrics.prometheus_output",
    HTTP: "trainckpt.metrics.prometheus_output",
    OTLP: "trainckpt.metrics.otlp_output",
}


def check(target: MetricsTarget | None) -> None:
    """Refuse a kind of target whose library is not installed."""
    if target is None:
        return
    module, extra = NEEDS[target.kind]
    try:
        found = importlib.util.find_spec(module)
    except ImportError:  # of a package around it
        found = None
    if found is None:
        raise ConfigurationError(
            f"metrics={target.text!r} needs {module}, which is not installed",
            hint=f"pip install 'trainckpt[{extra}]', or leave the option out",
        )


class _Sink(Protocol):
    """A place that metrics are sent to."""

    def publish(self) -> None:
        """Send the values now; raises `MetricsUnpublished`."""

    def close(self) -> None:
        """Free what it holds; nothing is sent any more."""


class MetricsPublisher:
    """The publisher of one attempt. Sequence of calls: `start`, any number of pairs of `suspend`
    and `resume`, `close`."""

    def __init__(self, target: MetricsTarget, readings: RunReadings, run: str) -> None:
        """Store the arguments; `run`: the run's place."""
        self._target, self._readings, self._run = target, readings, run
        self._pid = os.getpid()
        self._has_logged = False
        self._stopping = threading.Event()
        self._endpoint: HttpEndpoint | None = None
        self._thread: threading.Thread | None = None
        # Now, not on the thread: a loader worker forked amid an import waits for its lock for ever.
        importlib.import_module(OUTPUTS[target.kind])

    def start(self) -> None:
        """Publish from now on."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._publish, name="trainckpt-metrics", daemon=True)
        self._thread.start()

    def suspend(self) -> None:
        """Publish nothing until `resume`, before a process dump: no socket and no thread is left.

        Raises:
            TimeoutError: a request is under way and does not end.
        """
        self.end_soon()
        if self._thread is not None:
            self._thread.join(SUSPEND_WITHIN_S)  # a collector may not answer
            if self._thread.is_alive():
                raise TimeoutError(f"metrics are still being sent ({self._target.text})")
            self._thread = None

    def resume(self) -> None:
        """Publish again, after a restore."""
        self.start()

    def close(self) -> None:
        """End, with the last values. Waits 3 s at most; may be repeated.

        A forked child has the object but not the thread: nothing happens there.
        """
        if self._pid != os.getpid() or self._readings.is_over:
            return
        self._readings.is_over = True
        if self._thread is None and self._target.kind != HTTP:  # suspended for a dump not made
            self.start()
        self.end_soon()
        if self._thread is not None:
            self._thread.join(END_WITHIN_S)

    def end_soon(self) -> None:
        """Let the thread end."""
        self._stopping.set()
        if (endpoint := self._endpoint) is not None:
            endpoint.wake()

    # ---- the thread

    def _publish(self) -> None:
        try:
            if self._target.kind == HTTP:
                self._serve()
            else:
                self._push()
        except Exception as error:  # noqa: BLE001 - it ends the metrics, never the training
            self._log_once(f"{type(error).__name__}: {error}", "report it, please")

    def _serve(self) -> None:
        from trainckpt.metrics.prometheus_output import HttpEndpoint

        endpoint = HttpEndpoint(self._target.address, self._target.port, self._readings)
        self._endpoint = endpoint
        while not self._stopping.is_set():
            try:
                endpoint.open()
            except MetricsUnpublished as error:  # perhaps the attempt before is about to leave
                self._log_once(str(error), error.hint)
                self._stopping.wait(PUBLISH_EVERY_S)
                continue
            logger.info("metrics at http://%s/metrics", endpoint.address)
            endpoint.serve()
        self._endpoint = None
        endpoint.close()

    def _push(self) -> None:
        sink = self._open_sink()
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            try:
                sink.publish()
            except MetricsUnpublished as error:
                self._log_once(str(error), error.hint)
            except Exception as error:  # noqa: BLE001 - it may pass, and training goes on
                self._log_once(f"{type(error).__name__}: {error}", "report it, please")
            if not is_last:
                self._stopping.wait(PUBLISH_EVERY_S)
        sink.close()

    def _open_sink(self) -> _Sink:
        if self._target.kind == OTLP:
            from trainckpt.metrics.otlp_output import OtlpSink

            return OtlpSink(self._target.address, self._readings)
        from trainckpt.metrics.prometheus_output import PromFile

        return PromFile(self._target.address, self._readings, self._run)

    def _log_once(self, why: str, hint: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.warning("no metrics, training goes on: %s. Next: %s", why, hint)
