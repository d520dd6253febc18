"""The kinds of series on `/metrics`, from names, words and samples."""

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Samples = Iterable[tuple[tuple[str, ...], float]]
"""(values of the labels, value)."""


def gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=float(value))


def gauges(name: str, documentation: str, labels: list[str], samples: Samples) -> Metric:
    return _with(GaugeMetricFamily(name, documentation, labels=labels), samples)


def counters(name: str, documentation: str, labels: list[str], samples: Samples) -> Metric:
    """`name` ends in `_total`."""
    return _with(CounterMetricFamily(name, documentation, labels=labels), samples)


def _with(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
