"""Where members exchange with neighbours: what this peer's parameters become, and what it keeps for that.

    gossip, counted         its parameters move towards its neighbours'
    gossip, not counted     they stay
    mean, counted           they become the mean over all, which are the outer parameters
    mean, not counted       they stay

What a gossip round needs of earlier ones is kept in memory only. Who lacks copies of its neighbours (`choco`) brings
nothing to such rounds until the next mean, from which all begin anew; who lacks slow parameters and momentum (`noloco`)
begins with those where it stands, and no momentum.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.ids import PeerId, Round
from weft.peer.state.replica import Replica
from weft.sync.merge import gossip
from weft.sync.merge.gossip import Neighbour
from weft.sync.merge.outer import State
from weft.sync.merge.reduce import EncodedPart, codec_in, named
from weft.sync.method.choices import Choices
from weft.wire import Buffer


@dataclass(frozen=True)
class Met:
    """Whom a decided gossip round lets this peer meet.

    Args:
        taken: what it counts of this peer's neighbours; None: it is not here.
        weights: of these.
        is_known: False: it was decided for another process, and what it counts is not known any more.
    """

    taken: Mapping[PeerId, Buffer | None] = field(default_factory=dict)
    weights: Mapping[PeerId, float] = field(default_factory=dict)
    is_known: bool = True

    @property
    def lost(self) -> tuple[PeerId, ...]:
        """Return of whom nothing is here."""
        return tuple(sorted(peer for peer, data in self.taken.items() if data is None))


class Mixing:
    """Of one peer in a run whose members have neighbours."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._state: State = self._gossip().anew(replica.outer, {}, is_counted=False)
        self._after_mean: State = {}  # should this peer be counted in the mean that it brings its parameters to
        self._is_in_step = True
        self.distance: float | None = None  # to the last mean, in lengths of that mean

    @property
    def is_in_step(self) -> bool:
        """Whether this peer knows what it must of all gossip rounds since the last mean."""
        return self._is_in_step or self._replica.config.method.send != "difference"

    def payload(self, local: Float32[Tensor, " num"], round: int) -> EncodedPart:
        """Return what this peer brings to a gossip round.

        Raises:
            NotFinite: what was trained holds NaN or infinity.
        """
        codec = codec_in(self._replica.config.method, round)
        return named(codec.encode(self._gossip().payload(self._replica.outer, local, self._state)))

    def alone(self, local: Float32[Tensor, " num"]) -> Float32[Tensor, " num"]:
        """Return where this peer would go on without neighbours: what it brings to a mean."""
        computed = self._gossip()
        mine = computed.payload(self._replica.outer, local, self._state)
        position, self._after_mean = computed.mixed(local, self._state, mine, ())
        return position

    def meet(
        self, local: Float32[Tensor, " num"], sent: Buffer | None, met: Met, round: Round, choices: Choices
    ) -> Float32[Tensor, " num"]:
        """Return where this peer goes on after a gossip round.

        Args:
            sent: its own payload, which is counted; None: it is not.
            choices: by which the round was made.
        """
        if met.lost or not met.is_known:
            self._is_in_step = False
        codec, num = codec_in(choices, round), choices.num_gossiped(local.numel())
        mine = None if sent is None else codec.decode(sent, num, bounds.empty(num))
        position, self._state = self._gossip(choices).mixed(local, self._state, mine, self._theirs(met, codec, num))
        return position

    def begin(self, is_counted: bool) -> None:
        """Begin anew from the outer parameters, which are a mean over all."""
        state = self._after_mean if is_counted else self._state
        self._state = self._gossip().anew(self._replica.outer, state, is_counted)
        self._after_mean, self._is_in_step = {}, True

    def note_distance(self, local: Float32[Tensor, " num"]) -> None:
        """Note how far this peer has been from the mean, which the outer parameters are now."""
        outer = self._replica.outer
        self.distance = float((local - outer).norm() / outer.norm().clamp_min(1e-30))

    def lose(self, local: Float32[Tensor, " num"]) -> None:
        """Know of no gossip round: this peer has taken over another state, or goes on from where it stood before."""
        head = self._replica.head
        self._state = self._gossip().anew(local, {}, is_counted=False)
        self._is_in_step = head is None or not head.is_gossip

    def _theirs(self, met: Met, codec: Codec, num: int) -> Iterator[Neighbour]:
        decoded = bounds.empty(num)
        for peer in sorted(met.taken):
            data = met.taken[peer]
            if data is None:
                continue
            try:
                codec.decode(data, num, decoded)
            except PayloadError:  # of who was not counted nobody has looked
                self._is_in_step = False
                continue
            yield Neighbour(peer, met.weights.get(peer, 0.0), decoded)

    def _gossip(self, choices: Choices | None = None) -> gossip.Gossip:
        built = gossip.build(choices or self._replica.config.method)
        assert built is not None, "only asked where members have neighbours"
        return built
