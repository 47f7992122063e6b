"""Histograms of the front. Two of them take a value for every token and stream, so adding one must be cheap."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """The values of one set of labels. Bounds belong to the bucket below them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, values up to it) of every bucket, and the sum of all values."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        return buckets, self._sum


class Histogram(Collector):
    """One name and the series of all its labels. For the thread of the event loop only."""

    def __init__(self, name: str, documentation: str, label_names: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        """bounds: ascending, without infinity."""
        self._name, self._documentation, self._label_names, self._bounds = name, documentation, label_names, bounds
        self._series: dict[tuple[str, ...], Series] = {}

    def labels(self, *values: str) -> Series:
        assert len(values) == len(self._label_names), f"{self._name} has the labels {self._label_names}, not {values}"
        return self._series.setdefault(values, Series(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, series in self._series.items():
            family.add_metric(values, *series.cumulated())
        yield family
