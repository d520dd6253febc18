"""Latency histograms of this boot."""

from blitzd.node.face import HistogramData, Observations

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def new_observations() -> Observations:
    ttft, tpot, queue, e2e = (HistogramData(SECONDS, [0] * (len(SECONDS) + 1)) for _ in range(4))
    return Observations(ttft, tpot, queue, e2e)
