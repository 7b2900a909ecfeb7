"""Figures for Prometheus under vLLM's names, so that boards and alerts made for it work; weft's own beside them.

No prompt, no answer and no key is in them: what is counted are requests, tokens and seconds.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.clock import Clock, SystemClock
from weft.engine.engine import Totals
from weft.engine.scheduling.pages import PAGE
from weft.texts.asking.entry import Entry

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

LATELY_S = 10.0
_LABELS = ("model_name", "engine")
_ENGINE = "0"
# vLLM's buckets.
_FIRST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_MEND_S = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 20, 60)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TEXTS = (1, 2, 5, 10, 20)
_LENGTHS = (*(each * 10**ten for ten in range(5) for each in (1, 2, 5)), 100_000)


class Counted(Protocol):
    """What computes it, as far as it is measured."""

    @property
    def totals(self) -> Totals: ...


class Measured(Protocol):
    """A model, as far as it is measured."""

    @property
    def id(self) -> str: ...

    @property
    def engine(self) -> Counted: ...


class Metrics:
    """Of one server.

    Args:
        models: as it has them just now.
        clock: None: the system's.
    """

    def __init__(self, models: Mapping[str, Measured], clock: Clock | None = None) -> None:
        self._registry = CollectorRegistry()
        self._clock = clock or SystemClock()
        self._lately: deque[float] = deque(maxlen=10_000)  # when requests came

        def seconds(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", what, _LABELS, registry=self._registry, buckets=buckets)

        self._first = seconds("time_to_first_token_seconds", "Until the first token.", _FIRST_S)
        self._gap = seconds("inter_token_latency_seconds", "Between two tokens.", _GAP_S)
        self._gap_old = seconds("time_per_output_token_seconds", "The same, by its former name.", _GAP_S)
        self._mean_gap = seconds("request_time_per_output_token_seconds", "Mean of a request.", _GAP_S)
        self._whole = seconds("e2e_request_latency_seconds", "Until the end.", _REQUEST_S)
        self._queue = seconds("request_queue_time_seconds", "Until something was computed.", _REQUEST_S)
        self._prefill = seconds("request_prefill_time_seconds", "From then until the first token.", _REQUEST_S)
        self._decode = seconds("request_decode_time_seconds", "From the first token to the last.", _REQUEST_S)
        self._inference = seconds(
            "request_inference_time_seconds", "From the first work to the last token.", _REQUEST_S
        )
        self._prompt = seconds("request_prompt_tokens", "Of a prompt.", _LENGTHS)
        self._answer = seconds("request_generation_tokens", "Of an answer.", _LENGTHS)
        self._most = seconds("request_max_num_generation_tokens", "Most of one text of an answer.", _LENGTHS)
        self._n = seconds("request_params_n", "Texts asked for.", _TEXTS)
        self._max_tokens = seconds("request_params_max_tokens", "Tokens asked for.", _LENGTHS)
        self._steps = seconds("iteration_tokens_total", "Tokens of a step.", _STEP)

        def count(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, (*_LABELS, *labels), registry=self._registry)

        self._num_prompt = count("vllm:prompt_tokens", "Tokens of prompts.")
        self._num_answer = count("vllm:generation_tokens", "Tokens drawn.")
        self._ended = count("vllm:request_success", "Requests that ended, by how.", "finished_reason")
        self._mends = count(
            "weft_serve_mends",
            "Another member of a stage went on with a text, by why the one before was left.",
            "stage",
            "cause",
        )
        self._mend = Histogram(
            "weft_serve_mend_seconds",
            "Between the last token before such a mend and the first one after.",
            _LABELS,
            registry=self._registry,
            buckets=_MEND_S,
        )
        self._refused = Counter(
            "weft_serve_refused", "Requests that were not answered, by status.", ("status",), registry=self._registry
        )
        rate = Gauge("vllm:current_qps", "Requests a second, lately.", registry=self._registry)
        rate.set_function(self._rate)
        self._registry.register(_OfEngines(models))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def step(self, model: str) -> Callable[[int, int, float], None]:
        """Return what an engine tells its steps."""

        def told(num_drawn: int, num_read: int, _took_s: float) -> None:
            self._steps.labels(model, _ENGINE).observe(num_drawn + num_read)

        return told

    def _rate(self) -> float:
        since_s = self._clock.now() - LATELY_S
        return sum(at > since_s for at in self._lately) / LATELY_S

    def asked(self, model: str, num_prompt: int, n: int, max_tokens: int) -> None:
        self._lately.append(self._clock.now())
        self._num_prompt.labels(model, _ENGINE).inc(num_prompt)
        self._prompt.labels(model, _ENGINE).observe(num_prompt)
        self._n.labels(model, _ENGINE).observe(n)
        self._max_tokens.labels(model, _ENGINE).observe(max_tokens)

    def drawn(
        self, model: str, *, first_s: float | None = None, gap_s: float | None = None, num_tokens: int = 1
    ) -> None:
        """A token came, or several at once.

        Args:
            first_s: it is the first, so long after it was asked for.
            gap_s: so long after the one before; None: it came with that one. Of another server's answers it is
                when they were read, and a slow reader has part in that.
        """
        self._num_answer.labels(model, _ENGINE).inc(num_tokens)
        if first_s is not None:
            self._first.labels(model, _ENGINE).observe(first_s)
        if gap_s is not None:
            self._gap.labels(model, _ENGINE).observe(gap_s)
            self._gap_old.labels(model, _ENGINE).observe(gap_s)

    def mended(self, model: str, stage: int, cause: str) -> None:
        """Another member of a stage, counted from 1, went on with a text."""
        self._mends.labels(model, _ENGINE, str(stage), cause).inc()

    def paused(self, model: str, pause_s: float) -> None:
        """No token came for so long because members were left."""
        self._mend.labels(model, _ENGINE).observe(pause_s)

    def ended(self, model: str, reason: str, times: "tuple[float, float, float, float] | None", num_drawn: int) -> None:
        """A text ended.

        Args:
            times: when it was asked for, begun, first drawn and last drawn; None: nothing was drawn.
        """
        self._ended.labels(model, _ENGINE, reason).inc()
        self._answer.labels(model, _ENGINE).observe(num_drawn)
        self._most.labels(model, _ENGINE).observe(num_drawn)
        if times is None:
            return
        asked, began, first, last = times
        for histogram, took_s in (
            (self._whole, last - asked),
            (self._queue, began - asked),
            (self._prefill, first - began),
            (self._decode, last - first),
            (self._inference, last - began),
        ):
            histogram.labels(model, _ENGINE).observe(max(0.0, took_s))
        if num_drawn > 1:
            self._mean_gap.labels(model, _ENGINE).observe((last - first) / (num_drawn - 1))


class _OfEngines:
    """What engines hold and have done, read when it is asked for."""

    def __init__(self, models: Mapping[str, Measured]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        counters: dict[str, CounterMetricFamily] = {}
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Pages of keys and values.", labels=[*_LABELS, "block_size", "num_gpu_blocks"]
        )
        for model in self._models.values():
            totals = model.engine.totals
            labels = [model.id, _ENGINE]
            used = totals.num_held / max(1, totals.num_pages)
            for name, what, value in (
                ("vllm:num_requests_running", "Texts under way.", totals.num_running),
                ("vllm:num_requests_waiting", "Texts that wait.", totals.num_waiting),
                ("weft_serve_requests_behind", "Texts that wait for clients that read slowly.", totals.num_behind),
                ("vllm:num_requests_swapped", "None: pages are not moved.", 0),
                ("vllm:kv_cache_usage_perc", "Share of pages that are held.", used),
                ("vllm:gpu_cache_usage_perc", "The same, by its former name.", used),
                ("vllm:cpu_cache_usage_perc", "None: pages are not moved.", 0),
            ):
                gauges.setdefault(name, GaugeMetricFamily(name, what, labels=_LABELS)).add_metric(labels, value)
            for name, what, value in (
                ("vllm:prefix_cache_queries", "Tokens of prompts that could be shared.", totals.num_asked),
                ("vllm:prefix_cache_hits", "Tokens of prompts that had been read.", totals.num_shared),
                ("vllm:gpu_prefix_cache_queries", "The same, by its former name.", totals.num_asked),
                ("vllm:gpu_prefix_cache_hits", "The same, by its former name.", totals.num_shared),
                ("vllm:num_preemptions", "Texts that gave up their pages for others.", totals.num_yielded),
                ("vllm:spec_decode_num_drafts", "Steps of a text with guesses.", totals.num_guesses),
                ("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed.", totals.num_guessed),
                ("vllm:spec_decode_num_accepted_tokens", "Guesses that were drawn.", totals.num_right),
            ):
                counters.setdefault(name, CounterMetricFamily(name, what, labels=_LABELS)).add_metric(labels, value)
            info.add_metric([*labels, str(PAGE), str(totals.num_pages)], 1)
            for name, what, value in _of_members(model.engine):
                gauges.setdefault(name, GaugeMetricFamily(name, what, labels=_LABELS)).add_metric(labels, value)
        yield from gauges.values()
        yield from counters.values()
        yield info
        engines = [model.engine for model in self._models.values()]
        num_members = sum(each.paths.num_serving for each in engines if isinstance(each, Entry))
        is_alone = any(not isinstance(each, Entry) for each in engines)
        what = "Members that draw text, or 1: this machine, or the server behind it."
        yield GaugeMetricFamily("vllm:healthy_pods_total", what, value=num_members + is_alone)


def _of_members(engine: Counted) -> Iterator[tuple[str, str, float]]:
    """Yield what is known of members that compute a model; of what this machine computes, nothing."""
    if not isinstance(engine, Entry):
        return
    if engine.paths.round is not None:
        what = "Round of the newest weights that members of all stages have."
        yield "weft_serve_edition_round", what, engine.paths.round
    if engine.paths.trip_s:
        yield "weft_serve_path_seconds", "Of a token through all stages, of late.", engine.paths.trip_s
