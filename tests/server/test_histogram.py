"""Our histograms write what those of the client library write."""

from __future__ import annotations

import prometheus_client
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from server.histogram import Histogram

BOUNDS = (0.001, 0.5, 1, 16, 1048576)
VALUES = st.lists(st.sampled_from([*BOUNDS, 0, 0.25, 2.0**30]) | st.floats(0, 100), max_size=20)


def samples(registry: CollectorRegistry) -> list[str]:
    """The text without comments and stamps of creation, which only the library writes."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@settings(deadline=None)
@given(VALUES, VALUES)
def test_text_equals_the_librarys(first: list[float], second: list[float]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    reference = prometheus_client.Histogram("a:b_seconds", "b seconds", ("model", "engine"), buckets=BOUNDS, registry=theirs)
    histogram = Histogram("a:b_seconds", "b seconds", ("model", "engine"), BOUNDS)
    ours.register(histogram)
    for engine, values in (("0", first), ("1", second)):
        for each in (reference.labels("m", engine), histogram.labels("m", engine)):
            for value in values:
                each.observe(value)
    assert samples(ours) == samples(theirs)
