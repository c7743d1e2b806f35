"""Prometheus collectors built from the catalogue, and the endpoint that serves them.

A ``Metrics`` has its own registry, so that two runs in one process, or a test, do not meet. The
kind of a metric is its type: adding to a gauge does not type-check. Recording never raises for
what the world does; a wrong label is a bug of ours and is asserted.
"""

import threading
from collections.abc import Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from stoker.errors import BadInput
from stoker.observe.catalogue import (
    METRICS,
    CounterMetric,
    GaugeMetric,
    HistogramMetric,
    Metric,
)

LOOPBACK = "127.0.0.1"


class Metrics:
    """Every metric of the catalogue, ready to record."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        for metric in METRICS:
            self._build(metric)

    def add(self, metric: CounterMetric, amount: float = 1.0, **labels: str) -> None:
        """Count ``amount`` more."""
        counter = self._counters[metric.name]
        (counter.labels(**_checked(metric, labels)) if labels else counter).inc(amount)

    def total(self, metric: CounterMetric, total: float, **labels: str) -> None:
        """Bring a counter up to a total somebody else counts; a smaller total is a restart."""
        key = (metric.name, tuple(sorted(labels.values())))
        before = self._totals.get(key, 0.0)
        self._totals[key] = total
        self.add(metric, total - before if total >= before else total, **labels)

    def set(self, metric: GaugeMetric, value: float, **labels: str) -> None:
        """Say what it is now."""
        gauge = self._gauges[metric.name]
        (gauge.labels(**_checked(metric, labels)) if labels else gauge).set(value)

    def observe(self, metric: HistogramMetric, value: float, **labels: str) -> None:
        """Record one value."""
        histogram = self._histograms[metric.name]
        (histogram.labels(**_checked(metric, labels)) if labels else histogram).observe(value)

    def _build(self, metric: Metric) -> None:
        match metric:
            case CounterMetric():
                self._counters[metric.name] = Counter(
                    metric.name, metric.help, metric.labels, registry=self.registry
                )
            case GaugeMetric():
                self._gauges[metric.name] = Gauge(
                    metric.name, metric.help, metric.labels, registry=self.registry
                )
            case HistogramMetric():
                self._histograms[metric.name] = Histogram(
                    metric.name,
                    metric.help,
                    metric.labels,
                    registry=self.registry,
                    buckets=metric.buckets,
                )


class Endpoint:
    """A Prometheus endpoint on loopback, served by a thread of its own."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{LOOPBACK}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving; the port is free when this returns."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_endpoint(metrics: Metrics, port: int) -> Endpoint:
    """Serve ``metrics`` on loopback; port 0 takes any free one.

    Raises:
        BadInput: the caller's: the port is taken.
    """
    try:
        server, thread = start_http_server(port, addr=LOOPBACK, registry=metrics.registry)
    except OSError as error:
        raise BadInput(
            f"The metrics port {port} cannot be used: {error.strerror}; "
            "set observe.metrics_port to another, or to 0 for any free one."
        ) from error
    return Endpoint(server, thread)


def _checked(metric: Metric, labels: Mapping[str, str]) -> Mapping[str, str]:
    assert set(labels) == set(metric.labels), f"{metric.name} has the labels {metric.labels}"
    return labels
