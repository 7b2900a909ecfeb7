"""Along which members a text is computed: one of each stage, such that it comes soonest and holds others up least.

    node(m)     = n (s (1 + u) + w  +  r (s - s')) + c (q + p - h)
    edge(m, m') = n (rtt/2 + x / bps)               + (p - h') x / bps
    path        = the ring m_1 .. m_S, m_1 whose nodes and edges sum up to the least; those of a member that has some of
                  the text already count a tenth less, so that a text does not move for next to nothing

    n tokens to be drawn, p of the prompt, h of them here already; x bytes of a token's activations
    a, b, c  seconds of a step, for each row that draws, for each token of a prompt (`engine.scheduling.pace`)
    r texts that are drawn there, q tokens of prompts that wait there; w what these add to a step
    s        of a step with this text, s' without it; u the share of the time in which others' steps are under way

A token is at one member at a time, and of T seconds of its trip through all stages it is s here. So not all texts of a
member are in each step: of r + 1 there are (r + 1) s / T in one, and as many rows make it last s,

    s = a + b (r + 1) s / T,    which is a / (1 - b (r + 1) / T), at least a + b and at most a + b (r + 1)

Who comes finds another's step under way for u = r s / T (1 - s / T) of the time and waits for half of it, and as long
do others wait for him. In a model of one stage T = s, all are in each step, and nobody waits. r (s - s') is what all
others there pay for one row more, without which a path would be taken until it is as slow as the next (Pigou, "The
Economics of Welfare", 1920). From stage to stage the best way to each member is the best way to one of the
stage before and one edge more (Bellman, 1958); since the last stage's token goes back to the first, that is done for
each first member.

Whoever sends texts reserves at once: what members tell of themselves is two seconds old, and hundreds may be sent
meanwhile. Others who ask choose by the same news: where one has sent a fourth of all that is drawn, each text that it
has sent since counts as four. A peer that holds the whole model is a path of one stage.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from weft.engine.scheduling.budget import MAX_SLOWDOWN
from weft.ids import PeerId
from weft.pipeline.routing import Failure
from weft.rng import order_key
from weft.texts.messages import FORMS, MAX_LINKS, SectionServed

NUM_FIRST = 64  # first members that paths are looked for from: those that cost least, where there are more
AS_GOOD = 1.1  # times as long may a member take that has some of the text already
NEWS_LAG_S = 0.5  # what was reserved so shortly before a member told of itself may not be in what it told
NUM_GAPS = 64  # the time of a trip is a mean over about so many
MOST_GAP = 4.0  # times that mean: what is longer was a break
FIRST_STEP_S = 0.05  # where nobody of a stage has computed yet
FIRST_RTT_S, FIRST_BPS = 0.05, 50e6  # between two that nobody has measured


class Wanted(NamedTuple):
    """What is to be computed.

    Args:
        num_drawn: tokens that will probably be drawn.
        row_nbytes: of a token's activations, from stage to stage.
        trip_s: that a token takes through all stages, as long as texts took of late; 0: all rows are in each step.
        has_form: whether the last stage has to hold the answer to a form.
    """

    num_prompt: int
    num_drawn: int
    row_nbytes: int
    trip_s: float = 0.0
    has_form: bool = False


class Figures(NamedTuple):
    """Of a member of a stage.

    Args:
        num_held: tokens of the text that it has already.
    """

    step_s: float
    row_s: float
    token_s: float
    num_rows: float = 0
    num_waiting: float = 0
    num_held: int = 0


class Link(NamedTuple):
    rtt_s: float
    bps: float


Between = Callable[[PeerId, PeerId], Link]


def node_s(figures: Figures, wanted: Wanted) -> float:
    """Return what a member costs: seconds of this text, and of others for it."""
    num_rows, trip_s = figures.num_rows, wanted.trip_s
    before_s, step_s = (_step_s(figures, num, trip_s) for num in (num_rows, num_rows + 1))
    wait_s = min(figures.num_waiting * figures.token_s, (MAX_SLOWDOWN - 1) * before_s)
    each_s = step_s * (1 + _busy(num_rows, step_s, trip_s)) + wait_s + num_rows * (step_s - before_s)
    num_read = figures.num_waiting + max(0, wanted.num_prompt - figures.num_held)
    return wanted.num_drawn * each_s + num_read * figures.token_s


def _step_s(figures: Figures, num_rows: float, trip_s: float) -> float:
    """Return how long steps are where so many texts are drawn."""
    least_s = figures.step_s + figures.row_s * min(1, num_rows)
    most_s = figures.step_s + figures.row_s * num_rows
    share = figures.row_s * num_rows / trip_s if trip_s else 1.0
    return most_s if share >= 1.0 else max(least_s, min(most_s, figures.step_s / (1.0 - share)))


def _busy(num_others: float, step_s: float, trip_s: float) -> float:
    """Return for which share of the time a step of others is under way when a token comes."""
    away = max(0.0, 1.0 - step_s / trip_s) if trip_s else 0.0
    return min(1.0, num_others * step_s / trip_s) * away if away else 0.0


def edge_s(link: Link, wanted: Wanted, num_held: int) -> float:
    """Return what it costs to send on, to a member that has so many tokens of the text."""
    row_s = 8 * wanted.row_nbytes / link.bps
    return wanted.num_drawn * (link.rtt_s / 2 + row_s) + max(0, wanted.num_prompt - num_held) * row_s


def back_s(link: Link, wanted: Wanted) -> float:
    """Return what it costs to send tokens back to the first."""
    return wanted.num_drawn * link.rtt_s / 2


@dataclass(frozen=True)
class Path:
    """
    Args:
        cost_s: the sum that is the least.
    """

    peers: tuple[PeerId, ...]
    cost_s: float


def best(stages: Sequence[Mapping[PeerId, Figures]], between: Between, wanted: Wanted, tie: str = "") -> Path | None:
    """Return the path to take; None: a stage has nobody.

    Args:
        stages: who may compute each.
        tie: decides between those that are alike, differently for each text.
    """
    if not all(stages):
        return None
    peers = [sorted(stage, key=lambda peer: order_key(tie, peer)) for stage in stages]  # of equals the first is taken
    nodes = [
        np.array([node_s(stage[peer], wanted) / _liked(stage[peer]) for peer in here])
        for stage, here in zip(stages, peers, strict=True)
    ]
    edges = [
        np.array([[edge_s(between(a, b), wanted, stage[b].num_held) / _liked(stage[b]) for b in there] for a in here])
        for stage, (here, there) in zip(stages[1:], pairwise(peers), strict=True)
    ]
    paths = list[Path]()
    for first in np.argsort(nodes[0], kind="stable")[:NUM_FIRST]:
        start = peers[0][first]
        back = np.array([back_s(between(end, start), wanted) for end in peers[-1]])
        cost_s, way = _best_from(int(first), nodes, edges, back)
        path = tuple(here[at] for here, at in zip(peers, way, strict=True))
        paths.append(Path(path, cost_s))
    return min(paths, key=lambda path: path.cost_s)


def _liked(figures: Figures) -> float:
    """Return what node and edge of a member are divided by: a text that need not move stays."""
    return AS_GOOD if figures.num_held else 1.0


def _best_from(
    first: int,
    nodes: Sequence[Float64[np.ndarray, " here"]],
    edges: Sequence[Float64[np.ndarray, "here there"]],
    back: Float64[np.ndarray, " last"],
) -> tuple[float, list[int]]:
    """Return what the best way costs that begins and ends at a member of the first stage, and whom it goes by."""
    costs = np.full(len(nodes[0]), math.inf)
    costs[first] = nodes[0][first]
    before = []  # which member of the stage before is on the best way to each
    for node, edge in zip(nodes[1:], edges, strict=True):
        ways = costs[:, None] + edge
        before.append(ways.argmin(axis=0))
        costs = ways.min(axis=0) + node
    costs = costs + back
    way = [int(costs.argmin())]
    for each in reversed(before):
        way.append(int(each[way[-1]]))
    return float(costs[way[0]]), way[::-1]


# --- what an asker knows of members, and has sent them ---


@dataclass(eq=False)
class Reserved:
    """A path that a text takes, counted at its members until `Paths.ended`.

    Args:
        is_exact: whether all of its members compute with exact numbers.
    """

    peers: tuple[PeerId, ...]
    round: int
    at: float
    num_prompt: int
    is_exact: bool
    is_read: bool = False  # its prompt


class _News(NamedTuple):
    """What a member has told last.

    Args:
        num_own: of the texts that it drew then, those that were sent from here.
    """

    served: SectionServed
    at: float
    num_own: int


@dataclass
class _Bar:
    until: float
    num: int


@dataclass
class Paths:
    """To one model's stages, as one peer sees them.

    Args:
        num_stages: of the model.
    """

    num_stages: int
    _served: dict[tuple[int, PeerId], _News] = field(default_factory=dict)
    _sent: dict[tuple[int, PeerId], dict[Reserved, None]] = field(default_factory=dict)
    _links: dict[PeerId, dict[int, dict[PeerId, Link]]] = field(default_factory=dict)  # as each last told, by its stage
    _farthest: dict[PeerId, float] = field(
        default_factory=dict
    )  # of whom each tells, where it tells of as many as it can
    _bars: dict[PeerId, _Bar] = field(default_factory=dict)
    _trip_s: float = 0.0  # of a token, of late; 0: none has come
    _num_askers: float | None = None  # None: there was news since

    def seen(self, peer: PeerId, served: SectionServed, now: float) -> None:
        """A member tells of itself."""
        if served.stage >= self.num_stages:
            return
        num_own = sum(each.is_read for each in self.sent(served.stage, peer))
        self._served[served.stage, peer] = _News(served, now, min(num_own, served.num_rows))
        self._num_askers = None
        self._links.setdefault(peer, {})[served.stage] = {
            near.peer: Link(near.rtt_s, near.bps) for near in served.links
        }
        is_full = len(served.links) == MAX_LINKS
        self._farthest[peer] = max(near.rtt_s for near in served.links) if is_full else 0.0

    def gone(self, peer: PeerId) -> None:
        """It is linked no more."""
        for stage in range(self.num_stages):
            self._served.pop((stage, peer), None)
        self._num_askers = None
        self._bars.pop(peer, None)
        self._farthest.pop(peer, None)
        self._links.pop(peer, None)

    @property
    def empty(self) -> list[int]:
        """Return the stages that nobody serves."""
        there = {stage for (stage, _), (served, *_) in self._served.items() if served.rounds}
        return [stage for stage in range(self.num_stages) if stage not in there]

    @property
    def lacks_forms(self) -> bool:
        """Whether members of the last stage serve, and none holds answers to forms."""
        last = self.num_stages - 1
        there = [served for (stage, _), (served, *_) in self._served.items() if stage == last and served.rounds]
        return bool(there) and all(served.forms != FORMS for served in there)

    @property
    def round(self) -> int | None:
        """Return the newest round after which each stage has somebody with weights; None: there is none."""
        stages: list[set[int]] = [set() for _ in range(self.num_stages)]
        for (stage, _), (served, *_) in self._served.items():
            stages[stage].update(served.rounds)
        return max(set.intersection(*stages), default=None)

    @property
    def num_serving(self) -> int:
        """Return how many members serve."""
        return len({peer for (_, peer), (served, *_) in self._served.items() if served.rounds})

    @property
    def trip_s(self) -> float:
        """Return how long a token took through all stages, of late; 0: none has come."""
        return self._trip_s

    def serves(self, peer: PeerId) -> bool:
        """Return whether it says that it draws text, or computes for it."""
        return any(each == peer and served.rounds for (_, each), (served, *_) in self._served.items())

    def reserve(
        self,
        wanted: Wanted,
        now: float,
        *,
        without: Collection[PeerId] = (),
        held: Mapping[PeerId, int] | None = None,
        round: int | None = None,
        is_exact: bool = False,
        has_barred: bool = False,
        was: Reserved | None = None,
        tie: str = "",
    ) -> Reserved | None:
        """Return a path, counted at its members from now on; None: a stage has nobody for it just now.

        Args:
            held: tokens of the text that members have already.
            round: whose weights it has to have; None: the newest that a path has.
            is_exact: whether all have to compute with exact numbers.
            has_barred: whether members that are passed over just now may be in it, where a stage has no others.
            was: the path that it took until now: its members tell of it, too.
        """
        wanted = wanted._replace(trip_s=self._trip_s)
        rounds = {each for served, *_ in self._served.values() for each in served.rounds}
        barred = {*without, *self._barred(now)}

        def there(stage: int, of_round: int) -> list[PeerId]:
            here = [peer for (at, peer), (told, *_) in self._served.items() if at == stage and of_round in told.rounds]
            fit = [peer for peer in here if self._is_fit(stage, peer, has_form=wanted.has_form, is_exact=is_exact)]
            found = [peer for peer in fit if peer not in barred]
            return found if found or not has_barred else [peer for peer in fit if peer not in without]

        for each in sorted(rounds, reverse=True) if round is None else (round,):
            here = [there(stage, each) for stage in range(self.num_stages)]
            stages = [self._figures_of(stage, peers, held or {}, was) for stage, peers in enumerate(here)]
            path = best(stages, self.between, wanted, tie)
            if path is not None:
                are_exact = all(self._is_exact(stage, peer) for stage, peer in enumerate(path.peers))
                reserved = Reserved(path.peers, each, now, wanted.num_prompt, are_exact)
                for at in enumerate(path.peers):
                    self._sent.setdefault(at, {})[reserved] = None
                return reserved
        return None

    def lacks_weights_alone(self, without: Collection[PeerId], now: float, *, has_form: bool) -> bool:
        """Return whether each stage has somebody to be asked: where there is no path even so, they have no round's
        weights in common."""
        barred = {*without, *self._barred(now)}
        return self._each_has(barred, lambda _: True, is_exact=False, has_form=has_form)

    def may_come(self, round: int, without: Collection[PeerId], *, is_exact: bool, has_form: bool = False) -> bool:
        """Return whether there may soon be a path with a round's weights: who lacks them in some stage only lags."""

        def may_have(rounds: Sequence[int]) -> bool:
            return round in rounds or max(rounds) < round

        return self._each_has(without, may_have, is_exact=is_exact, has_form=has_form)

    def _each_has(
        self, without: Collection[PeerId], is_right: Callable[[Sequence[int]], bool], *, is_exact: bool, has_form: bool
    ) -> bool:
        """Return whether each stage has a fit member with weights, of rounds that are right."""
        stages = {
            stage
            for (stage, peer), (served, *_) in self._served.items()
            if peer not in without and served.rounds and is_right(served.rounds)
            if self._is_fit(stage, peer, has_form=has_form, is_exact=is_exact)
        }
        return len(stages) == self.num_stages

    def drew(self, reserved: Reserved) -> None:
        """The first token has come along it: the prompt is read, and nothing stands against its members."""
        reserved.is_read = True
        for peer in reserved.peers:
            self._bars.pop(peer, None)

    def came(self, gap_s: float) -> None:
        """A token of a text has come so long after the one before."""
        gap_s = min(gap_s, MOST_GAP * self._trip_s) if self._trip_s else gap_s
        self._trip_s += (gap_s - self._trip_s) / (NUM_GAPS if self._trip_s else 1)

    def sent(self, stage: int, peer: PeerId) -> Iterable[Reserved]:
        """Return the paths that are counted at a stage's member."""
        return self._sent.get((stage, peer), ())

    def ended(self, reserved: Reserved) -> None:
        for at in enumerate(reserved.peers):
            sent = self._sent.get(at, {})
            sent.pop(reserved, None)
            if not sent:
                self._sent.pop(at, None)

    def failed(self, peer: PeerId, why: Failure, now: float) -> None:
        """Pass a peer over for a while, longer each time until something came of it."""
        bar = self._bars.get(peer, _Bar(now, 0))
        pause_s = min(why.first_s * 2.0 ** min(bar.num, 64), why.most_s)
        self._bars[peer] = _Bar(max(bar.until, now + pause_s), bar.num + 1)

    def between(self, a: PeerId, b: PeerId) -> Link:
        if a == b:
            return Link(0.0, math.inf)
        found = self._told(a, b) or self._told(b, a)
        return found or Link(max(FIRST_RTT_S, self._farthest.get(a, 0.0)), FIRST_BPS)  # who is nearer would be told of

    def _told(self, by: PeerId, of: PeerId) -> Link | None:
        return next((links[of] for links in self._links.get(by, {}).values() if of in links), None)

    def gap_s(self, peers: Sequence[PeerId]) -> float:
        """Return how long it should take from a token to the next, by what the members of a path tell."""
        figures = [self._figures(stage, peer, 0) for stage, peer in enumerate(peers)]
        steps_s = [each.step_s + each.row_s * max(1, each.num_rows) for each in figures]
        waits_s = [
            min(each.num_waiting * each.token_s, (MAX_SLOWDOWN - 1) * step_s)
            for each, step_s in zip(figures, steps_s, strict=True)
        ]
        return sum(steps_s) + sum(waits_s) + self._round_s(peers)

    def ring_s(self, peers: Sequence[PeerId], num_prompt: int = 0) -> float:
        """Return how long it should take from a token to the next, or with a prompt to the first."""
        nodes = 0.0
        for stage, peer in enumerate(peers):
            figures = self._figures(stage, peer, 0)
            nodes += figures.step_s + figures.row_s * (figures.num_rows + 1)
            nodes += figures.token_s * (figures.num_waiting + num_prompt)
        return nodes + self._round_s(peers)

    def _round_s(self, peers: Sequence[PeerId]) -> float:
        return sum(self.between(a, b).rtt_s / 2 for a, b in pairwise((*peers, peers[0])))

    def _is_fit(self, stage: int, peer: PeerId, *, has_form: bool, is_exact: bool) -> bool:
        """Return whether a stage's member can hold an answer to a form, where there is one and it draws, and computes
        with exact numbers, where these are wanted."""
        holds = not has_form or stage < self.num_stages - 1 or self._served[stage, peer][0].forms == FORMS
        return holds and (self._is_exact(stage, peer) or not is_exact)

    def _is_exact(self, stage: int, peer: PeerId) -> bool:
        return self._served[stage, peer][0].numbers == "exact"

    def _figures_of(
        self, stage: int, peers: Iterable[PeerId], held: Mapping[PeerId, int], was: Reserved | None
    ) -> dict[PeerId, Figures]:
        found = {peer: self._figures(stage, peer, held.get(peer, 0), is_new=not held) for peer in peers}
        if was is not None and (peer := was.peers[stage]) in found:
            found[peer] = self._without(was, found[peer], self._served[stage, peer].at)
        return found

    def _without(self, was: Reserved, figures: Figures, told_at: float) -> Figures:
        """Return what a member has told without the text that took this path: it is not in its own way."""
        if was.at > told_at - NEWS_LAG_S:
            return figures
        if was.is_read:
            return figures._replace(num_rows=max(0, figures.num_rows - 1))
        return figures._replace(num_waiting=max(0, figures.num_waiting - was.num_prompt))

    def _figures(self, stage: int, peer: PeerId, num_held: int, *, is_new: bool = False) -> Figures:
        """Return what a member has told, and what was sent to it since.

        Args:
            is_new: whether it is for a text that nobody has read: what goes on stays with whom it has come by.
        """
        found = self._served.get((stage, peer))
        if found is None:
            return Figures(FIRST_STEP_S, 0.0, 0.0)
        served, told_at, _ = found
        step_s, row_s, token_s = _seconds(served) if served.step_s or not is_new else self._usual_s(stage)
        new = [each for each in self.sent(stage, peer) if each.at > told_at - NEWS_LAG_S]
        since, others = [each for each in new if each.at > told_at], self.num_askers - 1
        return Figures(
            step_s or FIRST_STEP_S,
            row_s,
            token_s,
            served.num_rows + len(new) + others * len(since),
            served.num_waiting + _num_unread(new) + others * _num_unread(since),
            num_held,
        )

    @property
    def num_askers(self) -> float:
        """Return how many times as many texts are drawn as were sent from here, by what members told last."""
        if self._num_askers is None:
            num_drawn = sum(news.served.num_rows for news in self._served.values())
            num_own = sum(news.num_own for news in self._served.values())
            self._num_askers = (1 + num_drawn) / (1 + num_own)
        return self._num_askers

    def _usual_s(self, stage: int) -> tuple[float, float, float]:
        """Return how long a step, a row more and a token more of a prompt take of who has not computed yet: as long as
        those of the stage's others, so that it is asked where they have something to do, and does not stay unknown."""
        told = [_seconds(served) for (each, _), (served, *_) in self._served.items() if each == stage and served.step_s]
        if not told:
            return FIRST_STEP_S, 0.0, 0.0
        steps, rows, tokens = zip(*told, strict=True)
        return median(steps), median(rows), median(tokens)

    def _barred(self, now: float) -> list[PeerId]:
        return [peer for peer, bar in self._bars.items() if bar.until > now]


def _num_unread(sent: Iterable[Reserved]) -> int:
    return sum(each.num_prompt for each in sent if not each.is_read)


def _seconds(served: SectionServed) -> tuple[float, float, float]:
    return served.step_s, served.row_s, served.token_s
