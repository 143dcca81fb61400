"""Publish a run's metrics from rank 0, on one thread of its own.

    textfile, otlp    the values now, then every 15 s, and the last ones at the attempt's end
    http              whenever they are asked for, until the attempt's end

Nothing here can hurt training: what fails is logged once, with what to do, and tried again; it is
logged anew if it worked meanwhile. The end of the attempt waits for the last values, but not long.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from typing import TYPE_CHECKING, Protocol

from trainckpt.attempt.log import logger
from trainckpt.attempt.metrics_target import HTTP, OTLP, TEXTFILE
from trainckpt.errors import ConfigurationError
from trainckpt.storage.redact import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.attempt.metrics_target import MetricsTarget
    from trainckpt.metrics.prometheus_output import HttpEndpoint
    from trainckpt.metrics.run_readings import RunReadings

PUBLISH_EVERY_S = 15.0
END_WITHIN_S, LEAST_END_S, SUSPEND_WITHIN_S = 3.0, 0.2, 15.0
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


class MetricsUnpublished(Exception):
    """Metrics could not be published: the place does not take them.

    Attributes:
        hint: What to do about it.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


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
        self._can_publish = self._import()

    def start(self) -> None:
        """Publish from now on."""
        if not self._can_publish:
            return
        self._stopping.clear()
        self._thread = threading.Thread(target=self._publish, name="trainckpt-metrics", daemon=True)
        self._thread.start()

    def suspend(self) -> None:
        """Publish nothing until `resume`, before a process dump: no socket and no thread is left.

        Raises:
            TimeoutError: a request is under way and does not end.
        """
        self._end_soon()
        if self._thread is not None:
            self._thread.join(SUSPEND_WITHIN_S)  # a collector may not answer
            if self._thread.is_alive():
                raise TimeoutError(f"metrics are still being sent ({self._target.text})")
            self._thread = None

    def resume(self) -> None:
        """Publish again, after a restore."""
        self.start()

    def close(self, left_s: float | None = None) -> None:
        """End, with the last values. Waits 3 s at most; may be repeated.

        A forked child has the object but not the thread: nothing happens there.

        Args:
            left_s: Seconds until the stop's deadline: no wait is longer, but for 0.2 s.
        """
        if self._pid != os.getpid() or self._readings.is_over:
            return
        self._readings.is_over = True
        has_ended = self._thread is None or not self._thread.is_alive()
        if has_ended and self._target.kind != HTTP:  # suspended for a dump that was not made
            self.start()
        self._end_soon()
        if self._thread is not None:
            within_s = END_WITHIN_S if left_s is None else min(END_WITHIN_S, left_s)
            self._thread.join(max(within_s, LEAST_END_S))

    def _end_soon(self) -> None:
        """Let the thread end."""
        self._stopping.set()
        if (endpoint := self._endpoint) is not None:
            endpoint.wake()

    def _import(self) -> bool:
        """Import what publishes; return False if that fails, as half of a package may be there.

        Now, not on the thread: a loader worker forked amid an import waits for its lock for ever.
        """
        try:
            importlib.import_module(OUTPUTS[self._target.kind])
        except Exception as error:  # noqa: BLE001 - the other ranks train, and so does this one
            self._warn(error, f"pip install 'trainckpt[{NEEDS[self._target.kind][1]}]'")
            return False
        return True

    # ---- the thread

    def _publish(self) -> None:
        try:
            if self._target.kind == HTTP:
                self._serve()
            else:
                self._push()
        except Exception as error:  # noqa: BLE001 - it ends the metrics, never the training
            self._warn(error)

    def _serve(self) -> None:
        from trainckpt.metrics.prometheus_output import HttpEndpoint

        host, port = self._target.address, self._target.port
        endpoint = HttpEndpoint(host, port, self._readings, self._warn)
        self._endpoint = endpoint
        try:
            while not self._stopping.is_set() and not self._succeeds(endpoint.open):
                self._stopping.wait(PUBLISH_EVERY_S)  # perhaps an attempt before is about to leave
            if endpoint.address:
                logger.info("metrics at http://%s/metrics", endpoint.address)
                endpoint.serve()
        finally:
            self._endpoint = None
            endpoint.close()

    def _push(self) -> None:
        with contextlib.closing(self._open_sink()) as sink:
            self._succeeds(sink.publish)
            while not self._stopping.wait(PUBLISH_EVERY_S):
                self._succeeds(sink.publish)
            if self._readings.is_over:
                self._succeeds(sink.publish)

    def _open_sink(self) -> _Sink:
        if self._target.kind == OTLP:
            from trainckpt.metrics.otlp_output import OtlpSink

            return OtlpSink(self._target.address, self._readings)
        from trainckpt.metrics.prometheus_output import PromFile

        return PromFile(self._target.address, self._readings, self._run)

    def _succeeds(self, call: Callable[[], object]) -> bool:
        """Call; return False if it failed, which may pass."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - training goes on
            self._warn(error)
            return False
        self._has_logged = False
        return True

    def _warn(self, error: Exception, hint: str = "report it, please") -> None:
        if self._has_logged:
            return
        self._has_logged = True
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, MetricsUnpublished):
            why, hint = str(error), error.hint
        logger.warning("no metrics, training goes on: %s. Next: %s", one_line(why), hint)
