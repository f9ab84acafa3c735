"""The /metrics page: what the front end sees of requests, and what the replicas report."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_serve import __version__
from dflash_serve.api.protocol import ReplicaStatus
from dflash_serve.log import get_logger
from dflash_serve.observe.replicas import replica_families

__all__ = ["CONTENT_TYPE", "Metrics", "RequestTimer"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ENGINE_LABEL = "all"
"""The front end measures over all replicas of a model."""

FAILURE_STATUSES = (400, 404, 405, 409, 413, 429, 500, 503)

# A verified block brings several tokens per step, so times per token reach below a millisecond;
# vLLM's own buckets begin at 10 ms.
_TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0),
)
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

logger = get_logger(__name__)

_P = ParamSpec("_P")


def _harmless(
    method: Callable[Concatenate[Any, _P], None],
) -> Callable[Concatenate[Any, _P], None]:
    """A method that reports what it raises to `self.count_error` and goes on."""

    @functools.wraps(method)
    def guarded(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # a measurement must never end a response
            self.count_error(error)

    return cast(Callable[Concatenate[Any, _P], None], guarded)


class Metrics:
    """Everything one front end measures; no method but `page` ever raises.

    Args:
        models: names served; their series exist from the start.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._errors = 0
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        labels = ("model_name", "engine")

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "From the parsed request to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two arrivals divided by the tokens the later one brought, per token.",
            _TOKEN_BUCKETS,
        )
        self.per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's time after its first tokens, per token that came after them.",
            _TOKEN_BUCKETS,
        )
        self.whole_request = histogram(
            "vllm:e2e_request_latency_seconds",
            "From the parsed request to its last token.",
            _REQUEST_BUCKETS,
        )
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", _COUNT_BUCKETS
        )
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens",
            "Completion tokens of a finished request.",
            _COUNT_BUCKETS,
        )
        self._failures = Counter(
            "dflash_http_failures",
            "Error answers, by status.",
            ("status",),
            registry=self._registry,
        )
        self._create_series(models)

    def request(self, model: str) -> RequestTimer:
        """A timer for one request, started now."""
        return RequestTimer(self, model)

    @_harmless
    def failure(self, status: int) -> None:
        """Count an error answer."""
        self._failures.labels(str(status)).inc()

    def count_error(self, error: Exception) -> None:
        """Count a measurement that failed; the first is logged with its traceback."""
        with self._lock:
            self._errors += 1
            first = self._errors == 1
        if first:
            logger.warning("a metric failed; further ones are only counted", exc_info=error)

    def page(self, statuses: Sequence[ReplicaStatus]) -> bytes:
        """The Prometheus text page.

        Args:
            statuses: the replicas that answered; the others' series are absent.
        """
        scrape = CollectorRegistry()
        scrape.register(_Scrape(replica_families(statuses, self.count_error)))
        own = CollectorRegistry()
        own.register(_Scrape(self._own_families()))
        pages = (generate_latest(r) for r in (self._registry, scrape, own))
        return b"".join(pages)

    def _own_families(self) -> list[Metric]:
        errors = CounterMetricFamily(
            "dflash_metrics_errors", "Measurements that failed.", value=self._errors
        )
        build = GaugeMetricFamily("dflash_build_info", "Always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        return [errors, build]

    @_harmless
    def _create_series(self, models: Sequence[str]) -> None:
        for status in FAILURE_STATUSES:
            self._failures.labels(str(status))
        for model in models:
            for metric in (
                self.first_token,
                self.inter_token,
                self.per_output_token,
                self.whole_request,
                self.prompt_tokens,
                self.generation_tokens,
            ):
                metric.labels(model, ENGINE_LABEL)


class RequestTimer:
    """Measures one request; no method ever raises.

    Args:
        metrics: where to put what was measured.
        model: the model's name.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._labels = (model, ENGINE_LABEL)
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = self._started
        self._tokens = 0
        self._first_tokens = 0

    def count_error(self, error: Exception) -> None:
        """Count a measurement that failed."""
        self._metrics.count_error(error)

    @_harmless
    def tokens(self, count: int) -> None:
        """Completion tokens arrived, now."""
        if count <= 0:
            return
        now = time.monotonic()
        gap, self._last = now - self._last, now
        self._tokens += count
        if self._first is None:
            self._first, self._first_tokens = now, count
            self._metrics.first_token.labels(*self._labels).observe(gap)
            return
        histogram = self._metrics.inter_token.labels(*self._labels)
        for _ in range(count):
            histogram.observe(gap / count)

    @_harmless
    def finished(self, prompt_tokens: int) -> None:
        """The request ended well, now."""
        now = time.monotonic()
        metrics, labels = self._metrics, self._labels
        metrics.whole_request.labels(*labels).observe(now - self._started)
        metrics.prompt_tokens.labels(*labels).observe(prompt_tokens)
        metrics.generation_tokens.labels(*labels).observe(self._tokens)
        later = self._tokens - self._first_tokens
        if self._first is not None and later > 0:
            metrics.per_output_token.labels(*labels).observe((self._last - self._first) / later)


class _Scrape:
    """Families made beforehand, as a collector."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
