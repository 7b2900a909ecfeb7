"""Which peer of a stage a micro-batch goes to: interleaved weighted round robin over measured paces.

    reserve   the peer whose account is lowest; it is charged at once with what the work should take it
    settled   a receipt came: the charge becomes what it took, and the pace learns
    failed    the charge is taken back, and the peer is passed over for a while, by what went wrong; who only has a
              queue is not

Accounts are in seconds of work, so of peers that are always at work each gets a share by its speed, and a fast one's
turns lie between a slow one's. Of what a peer takes only that counts which begins after it was sent, and after what it
was sent before was done: two micro-batches on their way to one peer do not make it half as fast.

A newcomer stands at the back, at the median's pace, and counts as slower than that for its first turns: nobody sends a
burst to a machine that has never computed. A nearer peer is asked first by as much as it is nearer, which moves its
turns and leaves its share.

Whoever sends work has one of these for each stage it sends to.

After Ryabinin et al., SWARM, 2301.11913, section 3.2 and its appendix: there charges are never taken back and newcomers
stand in front.

How fast a peer is, as those see it that send it work: a moving average of seconds per unit of work, without bias.

    m <- (1 - a) m + a x,  k <- k + 1,  mean = m / (1 - (1 - a)^k)

as Adam's moments are made unbiased (Kingma and Ba, 1412.6980, section 3): after one measurement the mean is that one.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from weft.ids import PeerId
from weft.rng import order_key

ALPHA = 0.1  # of the newest measurement, as SWARM's (2301.11913)


class Pace:
    """Of one peer."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0  # 1 - (1 - a)^k

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    @property
    def mean(self) -> float:
        """Return seconds per unit. Something must have been measured."""
        return self._sum / self._weight

    def measured(self, seconds_per_unit: float) -> None:
        """Take one more measurement up."""
        self._sum += ALPHA * (seconds_per_unit - self._sum)
        self._weight += ALPHA * (1.0 - self._weight)


FIRST_S = 1.0  # per unit of work, while nobody's pace is known
WARM_TURNS = 4  # in which a newcomer is charged more
WARM_COST = 2.0  # as many times what it should take
NUM_ANSWERS = 16  # of which the shortest tells how near a peer is
LEAST_S = 1e-6  # per unit: what took no time that this clock can tell


class Failure(Enum):
    """What went wrong with work that was sent: the first pause, and the longest, in seconds."""

    QUEUED = (0.0, 0.0)  # others wait for it
    BUSY = (0.1, 5.0)  # it has as much as it takes
    UNREACHABLE = (2.0, 60.0)
    ERROR = (10.0, 600.0)  # it answered that it could not

    def __init__(self, first_s: float, most_s: float) -> None:
        self.first_s = first_s
        self.most_s = most_s


@dataclass(frozen=True)
class Reserved:
    """Work that one peer is charged with until it is settled or failed."""

    peer: PeerId
    units: float
    charge_s: float
    sent_at: float


@dataclass
class _Account:
    began: int  # of its process: another one is a newcomer, whatever the last one did
    tie: str  # breaks ties, for each sender in its own way
    total_s: float  # charged
    pace: Pace = field(default_factory=Pace)
    num_turns: int = 0
    busy_until: float = -math.inf  # when its last receipt came
    barred_until: float | None = None  # None: it is not
    num_failed: int = 0  # since its last receipt
    answers: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_ANSWERS))  # seconds that they took

    @property
    def turn(self) -> tuple[float, str]:
        """Whose is lowest is next: the shortest answer is the way there and back, the others waited for something."""
        return self.total_s + min(self.answers, default=0.0), self.tie


class Router:
    """To one stage.

    Args:
        me: who sends; others begin with other peers.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._accounts: dict[PeerId, _Account] = {}
        self._turn_s = 0.0  # the lowest account when work was last given out

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._accounts)

    def seen(self, stage: Mapping[PeerId, int]) -> None:
        """Take up who holds the stage now, and since when its process does."""
        for peer in [peer for peer in self._accounts if peer not in stage]:
            del self._accounts[peer]
        for peer, began in stage.items():
            known = self._accounts.get(peer)
            if known is None or known.began != began:
                self._accounts.pop(peer, None)
                back = max((each.total_s for each in self._accounts.values()), default=0.0)
                self._accounts[peer] = _Account(began, order_key("route", self._me, peer), back)

    def reserve(
        self, units: float, now: float, without: Collection[PeerId] = (), most_s: float = math.inf
    ) -> Reserved | None:
        """Charge a peer with work; None: nobody can take it just now.

        Args:
            units: of work, such as samples; whoever measures in other units for one kind of work says how many.
            without: peers that failed with this work.
            most_s: per unit, that it may take.
        """
        free = [peer for peer in self._accounts if peer not in without and self._is_free(peer, now)]
        free = [peer for peer in free if self.pace_of(peer) <= most_s]
        if not free:
            return None
        peer = min(free, key=lambda peer: self._accounts[peer].turn)
        account = self._accounts[peer]
        self._turn_s = max(self._turn_s, account.total_s)
        warmth = WARM_COST if account.num_turns < WARM_TURNS else 1.0
        charge_s = units * warmth * self.pace_of(peer)
        account.total_s += charge_s
        account.num_turns += 1
        return Reserved(peer, units, charge_s, now)

    def _is_free(self, peer: PeerId, now: float) -> bool:
        account = self._accounts[peer]
        if account.barred_until is not None and account.barred_until <= now:
            account.barred_until = None
            account.total_s = max(account.total_s, self._turn_s)  # it has no turns to catch up on
        return account.barred_until is None

    def pace_of(self, peer: PeerId) -> float:
        """Return the seconds that a unit of work takes a peer; the median of the others', where that is not known."""
        account = self._accounts[peer]
        if account.pace.is_known:
            return account.pace.mean
        known = [each.pace.mean for each in self._accounts.values() if each.pace.is_known]
        return median(known) if known else FIRST_S

    def answered(self, peer: PeerId, took_s: float) -> None:
        """Take it up how long a peer took to say that it has heard: the shortest of the last is the way and back."""
        if peer in self._accounts:
            self._accounts[peer].answers.append(took_s)

    def settled(self, reserved: Reserved, now: float) -> None:
        """Take a receipt up: the work is done."""
        if (account := self._accounts.get(reserved.peer)) is not None:
            took_s = max(now - max(reserved.sent_at, account.busy_until), LEAST_S * reserved.units)
            account.total_s += took_s - reserved.charge_s
            account.pace.measured(took_s / reserved.units)
            account.busy_until, account.num_failed = now, 0

    def failed(self, reserved: Reserved, why: Failure, now: float) -> None:
        """Take it up that the work was not done, or that nobody knows."""
        if (account := self._accounts.get(reserved.peer)) is not None:
            account.total_s -= reserved.charge_s
            pause_s = min(why.first_s * 2.0 ** min(account.num_failed, 64), why.most_s)
            account.barred_until = max(account.barred_until or now, now + pause_s)
            account.num_failed += why is not Failure.QUEUED
