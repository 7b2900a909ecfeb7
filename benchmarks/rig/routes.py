"""Two other ways to choose the path of a text, for comparison in one play.

    Blind     by how far members are and how fast they compute, whatever waits there: Parallax's second phase (arXiv:
              2509.26182), whose term for load is 0.05 ms a layer at a full node, and nothing here. Who is full says so
    Oracle    by what is true at the moment of choice, of all lines and of members that have told of themselves, with
              what all entries have sent

Both minimise what production minimises, so they differ from it by what they know alone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from weft.ids import PeerId
from weft.sim.serving.machines import Machine
from weft.sim.serving.play import Stage
from weft.texts.asking.path import Figures, Link, Paths, Reserved, Wanted

ON_ITS_WAY_S = 0.1  # after which what was asked for has come to its members
ANY_BPS = 1e12


class Blind(Paths):
    def _figures_of(
        self, stage: int, peers: Iterable[PeerId], held: Mapping[PeerId, int], was: Reserved | None
    ) -> dict[PeerId, Figures]:
        seen = super()._figures_of(stage, peers, held, was)
        return {peer: figures._replace(num_rows=0, num_waiting=0) for peer, figures in seen.items()}


class Oracle(Paths):
    """
    Args:
        world: all there is.
    """

    def __init__(self, world: Stage) -> None:
        super().__init__(world.scenario.stages)
        self._world = world
        self._lines: dict[tuple[PeerId, PeerId], Link] = {}  # asked for some ten thousand times a choice

    def between(self, a: PeerId, b: PeerId) -> Link:
        if a == b:
            return super().between(a, b)
        if (found := self._lines.get((a, b))) is None:
            up, down = self._world.network.lines(a)[0], self._world.network.lines(b)[1]
            bps = min(up.bandwidth_bps or ANY_BPS, down.bandwidth_bps or ANY_BPS)
            found = self._lines[a, b] = Link(2 * (up.delay_s + down.delay_s), bps)
        return found

    def reserve(self, wanted: Wanted, now: float, *, without: Collection[PeerId] = (), **how: Any) -> Reserved | None:
        gone = {each.peer for each in self._world.machines.values() if each.member is None}
        return super().reserve(wanted, now, without=gone.union(without), **how)

    def _figures_of(
        self, stage: int, peers: Iterable[PeerId], held: Mapping[PeerId, int], was: Reserved | None
    ) -> dict[PeerId, Figures]:
        del was  # it is counted no more
        now, machines = self._world.clock.now(), {each.peer: each for each in self._world.machines.values()}
        asking = [entry.paths for entry in self._world.entries]
        sent = {peer: [each for paths in asking for each in paths.sent(stage, peer)] for peer in peers}
        return {peer: _true(machines[peer], sent[peer], now, held.get(peer, 0)) for peer in sent}


def _true(machine: Machine, sent: Sequence[Reserved], now: float, num_held: int) -> Figures:
    like = machine.computing.like
    assert machine.member is not None, "who has gone is not asked"
    new = sum(each.num_prompt for each in sent if not each.is_read and each.at > now - ON_ITS_WAY_S)
    num_waiting = machine.member.served().num_waiting + new
    return Figures(like.step_ms / 1000, like.row_ms / 1000, like.token_ms / 1000, len(sent), num_waiting, num_held)
