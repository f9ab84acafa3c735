"""What the front end counts of requests whose engine failed under them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

__all__ = ["ResumeMetrics"]

_LABELS = ("model_name", "engine")
_ENGINE = "all"
"""Requests move between replicas, so these are counted over all of a model."""

_PAUSE_BUCKETS = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0),
    *(90.0, 120.0, 240.0, 480.0),
)


class ResumeMetrics:
    """Counters and the length of pauses.

    Args:
        models: names served; their series exist from the start.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        self._resumed = self._counter(
            "dflash_requests_resumed", "Times a request went on after its engine had failed."
        )
        self._submissions = self._counter(
            "dflash_resume_attempts",
            "Submissions of requests whose engine had failed, refused ones included.",
        )
        self._failed = self._counter(
            "dflash_requests_failed_after_resume",
            "Requests that ended with an error after an engine had failed under them.",
        )
        self._pauses = Histogram(
            "dflash_resume_pause_seconds",
            "From the failure of a request's engine to its next token.",
            _LABELS,
            buckets=_PAUSE_BUCKETS,
            registry=self._registry,
        )
        for model in models:
            for metric in (self._resumed, self._submissions, self._failed, self._pauses):
                metric.labels(model, _ENGINE)

    def submitted_again(self, model: str) -> None:
        """A request whose engine failed is submitted another time."""
        self._submissions.labels(model, _ENGINE).inc()

    def resumed(self, model: str, pause_s: float) -> None:
        """A token came, `pause_s` seconds after an engine had failed."""
        self._resumed.labels(model, _ENGINE).inc()
        self._pauses.labels(model, _ENGINE).observe(pause_s)

    def gave_up(self, model: str) -> None:
        """A request ended with an error after an engine had failed under it."""
        self._failed.labels(model, _ENGINE).inc()

    def page(self) -> bytes:
        """The Prometheus text of these metrics."""
        page: bytes = generate_latest(self._registry)
        return page

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry)
