"""Who strays from the others, and whether all together get anywhere, judged by numbers that members show.

    band of i     m +- max(width + share |m|, 6 d, 6 e), and wider by the slack of i on one side
    m, d          median of what the others showed last, two or more of them, and the median distance from it
    e             median distance of their last five values from the median of each one's own

Half of the others may show anything without moving a median far, and neither how members differ nor how their values
scatter leaves the band. Who has shown five values is judged by each new one. A member has left the band once three in
a row were outside, and is back after three in a row inside: each is said once.

Progress is told by the median over members: that of the last rounds against that of the first ones, and where two are
in the middle, the one that speaks for progress. Of a run of few rounds it takes fewer, two at least. It is judged by
who saw the run begin: later a loss may stand still for good reasons.

`Sentinel` says who strays from the others, and that nobody learns. It decides nothing: a person may. Where members
audit each other, who strays is looked at more often (`weft.verify.suspicion`).

    loss      what members tell of their inner steps with their heartbeats, the last of each round: their word. The mean
              of a round that is under way is of few steps, and those that follow have the same steps in them
    update    the length of what they bring, of a delta by the tokens in it to the power of 3/4: measured by this peer,
              on the part that it merges, once decoded; or of what its neighbours bring, in lengths of its own. Who
              makes fewer steps than the others may be shorter, and who makes more may be longer

A member that computes on garbage, or with other rates than the run's, shows in both; one that lies about its loss shows
in the second alone. What has a legacy or a group in it is not measured: it is the work of several. Neither is,
where members exchange with neighbours, what is mixed with others' work (`RoundMerger`). In lengths of this peer's own,
since each meets others in other rounds, in which rates are others.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from statistics import median, median_high, median_low

from weft.events import Emit, MemberStrays, NotLearning
from weft.ids import PeerId, Round
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.peer.round.merge import RoundMerger
from weft.sync.method.choices import Choices
from weft.sync.records.messages import Contribution, Manifest

WINDOW = 5  # values of a member
MADS = 6.0  # some three standard deviations: of five values one is their median itself
IN_A_ROW = 3
LEAST_OTHERS = 2
STRETCH = 6  # losses whose median stands for all of them
SHORT = 2  # as many where the run has few rounds
PIECES = 8  # of the run: a longer stretch is no beginning
BEGUN = 0.05  # of the run: who comes later did not see it begin,
FIRST_ROUNDS = 2  # but in these
DUE = 0.1  # of the run, by when there is progress, or none


@dataclass(frozen=True)
class Strayed:
    """A member has left the band, or is back in it.

    Args:
        value: what it showed last.
        usual: the median of the others.
    """

    peer: PeerId
    value: float
    usual: float
    is_back: bool


class Band:
    """Of one kind of value.

    Args:
        width: half of the least band.
        share: of the others' median, that is added to it.
    """

    def __init__(self, width: float = 0.0, share: float = 0.0) -> None:
        self._width = width
        self._share = share
        self._shown: dict[PeerId, deque[float]] = {}
        self._in_a_row: dict[PeerId, int] = {}  # times on the other side of the border than before
        self._outside: set[PeerId] = set()

    def take(self, values: Mapping[PeerId, float], slack: Mapping[PeerId, float] | None = None) -> list[Strayed]:
        """Take up the newest values, of some or all, and return whose place has changed.

        Args:
            slack: by which the band of each is wider this time: above, or below where it is negative.
        """
        for peer, value in values.items():
            self._shown.setdefault(peer, deque(maxlen=WINDOW)).append(value)
        judged = (self._judge(peer, (slack or {}).get(peer, 0.0)) for peer in sorted(values))
        return [each for each in judged if each is not None]

    def keep(self, members: Container[PeerId]) -> None:
        """Forget all others."""
        for peer in [peer for peer in self._shown if peer not in members]:
            del self._shown[peer]
            self._in_a_row.pop(peer, None)
            self._outside.discard(peer)

    def _judge(self, peer: PeerId, slack: float) -> Strayed | None:
        others = [shown for other, shown in self._shown.items() if other != peer and len(shown) == WINDOW]
        if len(others) < LEAST_OTHERS or len(self._shown[peer]) < WINDOW:
            return None
        value, lasts = self._shown[peer][-1], [shown[-1] for shown in others]
        usual = median(lasts)
        apart = median(abs(last - usual) for last in lasts)
        scatter = median(abs(each - middle) for shown in others for middle in (median(shown),) for each in shown)
        width = max(self._width + self._share * abs(usual), MADS * apart, MADS * scatter)
        is_outside = not -width + min(slack, 0.0) <= value - usual <= width + max(slack, 0.0)
        was_outside = peer in self._outside
        self._in_a_row[peer] = self._in_a_row.get(peer, 0) + 1 if is_outside != was_outside else 0
        if self._in_a_row[peer] < IN_A_ROW:
            return None
        self._in_a_row[peer] = 0
        (self._outside.discard if was_outside else self._outside.add)(peer)
        return Strayed(peer, value, usual, is_back=was_outside)


def usual(told: Collection[float], num_members: int) -> float | None:
    """Return the median of what members told last; None: too few did, of so many."""
    return median(told) if len(told) >= max(1, min(LEAST_OTHERS + 1, num_members)) else None


@dataclass(frozen=True)
class Stalled:
    """The loss is no lower than at first."""

    first: float
    now: float


class Progress:
    """Whether a loss falls while the run goes on."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=STRETCH)
        self._num = 0
        self._saw_it_begin: bool | None = None
        self._is_said = False

    def take(self, round: int, share: float, loss: float) -> Stalled | None:
        """Take up a loss.

        Args:
            round: after which it is told.
            share: of the run's tokens that is counted by now.

        Returns:
            once, that there is no progress; again after there was some.
        """
        if self._saw_it_begin is None:
            self._saw_it_begin = share <= BEGUN or round <= FIRST_ROUNDS
        if not self._saw_it_begin:
            return None
        self._num += 1
        self._last.append(loss)
        if len(self._first) < STRETCH:
            self._first.append(loss)
        stretch = self._stretch(share)
        if share < DUE or self._num < 2 * stretch:
            return None
        first, now = median_high(self._first[:stretch]), median_low(list(self._last)[-stretch:])
        if now < first:
            self._is_said = False
        elif not self._is_said:
            self._is_said = True
            return Stalled(first, now)
        return None

    def _stretch(self, share: float) -> int:
        """Return how many losses are the first, of as many as a whole run would tell at this pace: an even number, of
        which the middle is two."""
        wanted = STRETCH if share <= 0 else int(self._num / share) // PIECES * 2
        return max(SHORT, min(STRETCH, wanted))


LOSS_SHARE = 0.3  # of the others' loss: batches differ, and so do members' rounds
# How the length of a delta grows with its tokens: by the power of 1 where steps point the same way, of 1/2 where they
# point to all sides. So a lease may be 250 times as large as another, and who has it is not outside.
GROWTH = 0.75
TIMES = 4.0  # as long as the others' or as short: that much have leases of other sizes
# The same where rounds wait for nobody: members have made many steps or few, and AdamW's lengths differ by it. One nine
# times as fast as another brought up to 12 times as much, on a part of rows that no text reaches.
TIMES_AGED = 16.0
# How much shorter or longer for each of fewer or more tokens, beyond that, as a power. A member that makes one step
# where the others make eight, because its machine is busy, brought 28 times less than `GROWTH` tells: where rates rise
# within a round its steps have the lowest, its AdamW remembers larger gradients, and those of rows that no text reaches
# vanish.
SLACK = 1.5


class Sentinel:
    """Of one peer.

    Args:
        method: of the run.
    """

    def __init__(self, peer: PeerId, emit: Emit, method: Choices, merger: RoundMerger) -> None:
        self._peer = peer
        self._emit = emit
        self._losses = Band(share=LOSS_SHARE)
        self._lengths = Band(width=math.log(TIMES if method.wait == "all" else TIMES_AGED))
        self._is_sum = not method.sends_gradient  # of steps: the more, the longer
        self._has_neighbours = method.graph is not None
        self._progress = Progress()
        self._told: dict[PeerId, tuple[Round, float]] = {}  # the last that each told, and in which round
        self._judged: dict[PeerId, float] = {}  # of what each told, what was judged last
        # Of the round that is merged, logarithms: of lengths, as they are compared, and of tokens.
        self._measured: tuple[Round, dict[PeerId, tuple[float, float]]] = (Round(0), {})
        self._round = Round(0)  # of the last look
        self._on_strays: Callable[[PeerId, str, bool], None] = lambda _peer, _what, _is_back: None
        merger.on_added(self.merged)

    def on_strays(self, told: Callable[[PeerId, str, bool], None]) -> None:
        """Call `told` with a member that strays in something, or is back in it."""
        self._on_strays = told

    def merged(self, round: Round, contribution: Contribution, length: float, is_whole: bool = False) -> None:
        """Take up how long a contribution is in the part that this peer merges.

        Args:
            is_whole: it is that of a neighbour, or this peer's own to them.
        """
        if is_whole != self._has_neighbours:  # a mean of what neighbours have mixed
            return
        if contribution.legacy is not None or contribution.group is not None or not (contribution.tokens and length):
            return
        if self._measured[0] != round:  # the one before is whole
            self._compare(self._measured[1])
            self._measured = round, {}
        tokens = math.log(contribution.tokens)
        unit = GROWTH * tokens if self._is_sum else 0.0
        self._measured[1][contribution.peer] = math.log(length) - unit, tokens

    def _compare(self, measured: dict[PeerId, tuple[float, float]]) -> None:
        """Judge the lengths of a round; what neighbours bring, by what this peer brings."""
        own = measured.get(self._peer) if self._has_neighbours else (0.0, 0.0)
        if own is None:
            return
        slack = {}
        for peer, (_, tokens) in measured.items():
            others = (
                [own[1]] if self._has_neighbours else [each for other, (_, each) in measured.items() if other != peer]
            )
            if self._is_sum and others:
                slack[peer] = SLACK * (tokens - median(others))
        lengths = {peer: length - own[0] for peer, (length, _) in measured.items()}
        self._say("update", self._lengths.take(lengths, slack), math.exp)

    def look(self, head: Manifest, membership: Membership, own: Heartbeat, tokens: int) -> None:
        """Take up what members tell.

        Args:
            own: this peer's heartbeat.
            tokens: of the whole run.
        """
        for band in (self._losses, self._lengths):
            band.keep(head.members)
        self._told = {peer: told for peer, told in self._told.items() if peer in head.members}
        self._judged = {peer: loss for peer, loss in self._judged.items() if peer in head.members}
        beats = {peer: membership.heartbeat_of(peer) for peer in head.members} | {self._peer: own}
        self._say("loss", self._losses.take(self._news(beats)), float)
        told = [loss for _, loss in self._told.values()]
        middle, is_new, self._round = usual(told, len(head.members)), head.round != self._round, head.round
        if middle is None or not is_new:
            return
        if stalled := self._progress.take(head.round, head.committed_tokens / tokens, middle):
            self._emit(
                NotLearning(
                    round=head.round,
                    committed_tokens=head.committed_tokens,
                    first_loss=stalled.first,
                    loss=stalled.now,
                    num_members=len(head.members),
                )
            )

    def _news(self, beats: dict[PeerId, Heartbeat | None]) -> dict[PeerId, float]:
        """Return the last loss that each told in a round that is over for it, once.

        Until it makes a step in the next one it tells the same again.
        """
        found = {}
        for peer, beat in beats.items():
            if beat is None or beat.loss is None or not math.isfinite(beat.loss):
                continue
            round, loss = self._told.get(peer, (beat.round, beat.loss))
            if round != beat.round and loss != self._judged.get(peer):
                self._judged[peer] = found[peer] = loss
            self._told[peer] = beat.round, beat.loss
        return found

    def _say(self, what: str, changes: list[Strayed], unit: Callable[[float], float]) -> None:
        for each in changes:
            self._on_strays(each.peer, what, each.is_back)
            self._emit(
                MemberStrays(
                    member=each.peer,
                    round=self._round,
                    what=what,
                    value=unit(each.value),
                    usual=unit(each.usual),
                    is_back=each.is_back,
                )
            )
