"""Who holds which stage, as each peer says of itself; and which members of a stage compute each micro-batch together.

It is a plain table: what is heard goes in, what is asked comes out.

    ready    d a c e b   size 2        (a, b) (c, d) (e)        the first leads; who is left over computes alone

All who know the same members find the same teams. Micro-batches go to those who lead.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from statistics import median

from weft.ids import PeerId
from weft.pipeline.placement import Stage
from weft.stages.messages import Held, StageNews

MIN_NAMING = 2  # members: one alone keeps nobody from being sent work
UNKNOWN = 1.0  # samples a second, of peers of which nobody has measured one


class StageTable:
    """
    Args:
        num_stages: of the run.
        has_tied: whether there is a tied matrix, whose number follows on theirs.
        costs: of a sample in each stage, 1 where work is usual; None: they are alike.
    """

    def __init__(self, num_stages: int, *, has_tied: bool = False, costs: Sequence[float] | None = None) -> None:
        self.num_stages = num_stages
        self.costs = list(costs or [1.0] * num_stages)
        self.num_pieces = num_stages + has_tied
        self._news: dict[PeerId, StageNews] = {}

    def told(self, peer: PeerId, news: StageNews) -> None:
        """Take up what `peer` says of itself; of stages that the run does not have, nothing."""
        self._news[peer] = news

    def gone(self, peer: PeerId) -> None:
        """Forget a peer that is linked no more."""
        self._news.pop(peer, None)

    @property
    def peers(self) -> dict[PeerId, StageNews]:
        return dict(self._news)

    def others(self, me: PeerId) -> list[PeerId]:
        """Return who else takes part, ascending; not who only watches."""
        return sorted(peer for peer, news in self._news.items() if news.is_trainer and peer != me)

    def held(self, stage: int) -> dict[PeerId, Held]:
        """Return who holds a stage, or a tied matrix, in whatever state."""
        return {peer: each for peer, each in self._all() if each.stage == stage}

    def ready(self, stage: int) -> dict[PeerId, Held]:
        """Return who computes micro-batches of a stage."""
        return {peer: each for peer, each in self.held(stage).items() if each.state == "ready"}

    def trusted(self, stage: int) -> dict[PeerId, Held]:
        """Return the same but those whom most of the others name untrusted, two at least.

        Who computes something else is struck out of its stage; only the members of that know it, or, of who claims to
        hold the stage and is no member, have found it. Where nobody would be left, all are returned.
        """
        ready = self.ready(stage)
        named = Counter(peer for by, each in ready.items() for peer in set(each.untrusted or ()) - {by})
        found = {
            peer: each
            for peer, each in ready.items()
            if named[peer] < MIN_NAMING or 2 * named[peer] <= len(ready.keys() - {peer})
        }
        return found or ready

    def rates(self) -> list[Stage]:
        """Return each stage's members, those who are on their way to it included, and the rate of each.

        Rates are of work that is usual, as in `pipeline.placement`. A peer that holds several shares its rate
        among them. One that is not known is the median of the others'.
        """
        stages = [
            {peer: each.rate * cost for peer, each in sorted(self.held(stage).items())}
            for stage, cost in enumerate(self.costs)
        ]
        known = [rate for stage in stages for rate in stage.values() if rate]
        usual = median(known) if known else UNKNOWN
        num_held = {peer: len(news.held) for peer, news in self._news.items()}
        return [{peer: (rate or usual) / num_held[peer] for peer, rate in stage.items()} for stage in stages]

    def empty(self) -> list[int]:
        """Return the stages that nobody holds."""
        return [stage for stage in range(self.num_stages) if not self.held(stage)]

    def kept(self, stage: int) -> dict[PeerId, int]:
        """Return who has a state of a stage on its disk, and of which round."""
        return {peer: kept.round for peer, news in self._news.items() for kept in news.kept if kept.stage == stage}

    def _all(self) -> Iterator[tuple[PeerId, Held]]:
        for peer, news in self._news.items():
            yield from ((peer, each) for each in (*news.held, news.tied) if each is not None)


Team = tuple[PeerId, ...]


def teams(ready: Iterable[PeerId], size: int) -> list[Team]:
    """Return all teams of a stage's members; of who is left over each is one."""
    order = sorted(ready)
    num_whole = len(order) // size * size
    whole = [tuple(order[start : start + size]) for start in range(0, num_whole, size)]
    return [*whole, *((peer,) for peer in order[num_whole:])]


def leaders(ready: Collection[PeerId], size: int) -> frozenset[PeerId]:
    return frozenset(team[0] for team in teams(ready, size))


def team_of(peer: PeerId, ready: Collection[PeerId], size: int) -> Team:
    """Return the team that a peer is in; of one that is not ready, itself."""
    return next((team for team in teams(ready, size) if peer in team), (peer,))
