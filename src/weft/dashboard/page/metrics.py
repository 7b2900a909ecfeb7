"""A history's figures for Prometheus, in its text format.

Names begin with weft_ and end in their unit. A peer is a label, by name and the first digits of its key; a stage is one
by its number from 1.
"""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.dashboard.history import History, Now
from weft.dashboard.words import SEVERITIES

CONTENT_TYPE = CONTENT_TYPE_LATEST


def metrics_of(history: History) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(history))
    return generate_latest(registry)


class _Collector:
    def __init__(self, history: History) -> None:
        self._history = history

    def collect(self) -> Iterator[Metric]:
        now = self._history.now
        yield _counter("weft_rounds", "Rounds that were committed.", now.num_rounds)
        yield _counter("weft_tokens", "Tokens that rounds have counted.", now.committed_tokens)
        if now.total_tokens is not None:
            yield _gauge("weft_wanted_tokens", "Tokens that the run is to count.", now.total_tokens)
        yield _counter("weft_moved_bytes", "Sent and received by the peers that are heard.", now.moved_nbytes)
        yield _counter("weft_ring_bytes", "What ring data-parallel training would have moved.", now.ring_nbytes)
        if now.loss is not None:
            yield _gauge("weft_loss_nats_per_token", "Mean loss of the last round's inner steps.", now.loss)
        if now.heldout is not None:
            yield _gauge("weft_heldout_loss_nats_per_token", "Loss on held-out text.", now.heldout)
        events = CounterMetricFamily("weft_events", "Events by how much they concern a person.", labels=["severity"])
        for name, count in zip(SEVERITIES, now.num_events, strict=True):
            events.add_metric([name], count)
        yield events
        labels = ["peer", "name"]
        up = GaugeMetricFamily("weft_peer_up", "1 while a peer takes part, by what is known.", labels=labels)
        speed = GaugeMetricFamily("weft_peer_tokens_per_second", "Speed of inner steps.", labels=labels)
        at_round = GaugeMetricFamily("weft_peer_round", "The last round that a peer has applied.", labels=labels)
        counted = CounterMetricFamily("weft_peer_tokens", "Tokens that rounds counted of a peer.", labels=labels)
        missed = CounterMetricFamily("weft_peer_missed_rounds", "Rounds without its contribution.", labels=labels)
        moved = CounterMetricFamily("weft_peer_bytes", "Sent and received by a peer.", labels=[*labels, "direction"])
        for peer in now.peers:
            of = [peer.key[:16], peer.name]
            up.add_metric(of, float(peer.is_here))
            speed.add_metric(of, peer.tokens_per_s)
            counted.add_metric(of, peer.counted_tokens)
            if peer.round is not None:
                at_round.add_metric(of, peer.round)
            if peer.is_heard:
                missed.add_metric(of, peer.num_missed)
                moved.add_metric([*of, "sent"], peer.sent_nbytes)
                moved.add_metric([*of, "received"], peer.received_nbytes)
        yield from (up, speed, at_round, counted, missed, moved)
        if now.stages:
            yield from _of_stages(now)


def _of_stages(now: Now) -> Iterator[Metric]:
    labels = ["stage"]
    members = GaugeMetricFamily("weft_stage_peers", "Peers that compute a stage.", labels=labels)
    speed = GaugeMetricFamily("weft_stage_samples_per_second", "What they would compute, never waiting.", labels=labels)
    waiting = GaugeMetricFamily("weft_stage_waiting_micro_batches", "Micro-batches that wait there.", labels=labels)
    for number, stage in enumerate(now.stages, 1):
        members.add_metric([str(number)], len(stage.members))
        speed.add_metric([str(number)], stage.rate)
        waiting.add_metric([str(number)], stage.waiting)
    yield from (members, speed, waiting)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
