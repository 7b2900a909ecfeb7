"""The methods that a run file can name, side by side: their choices, what they send, and when to pick one.

Bytes follow from the codecs and `weft.cost`: of one peer among `PEERS`, of a model of size `MODEL`, both ways alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from weft.codec.config import NonzeroConfig
from weft.ids import several
from weft.model.config import named
from weft.model.flat import layout
from weft.sync.costs import round_traffic
from weft.sync.method import presets
from weft.sync.method.choices import Choices

PEERS = 4
MODEL = "nano"
VOCABULARY = 4096
RING_BITS = 2 * 16  # a parameter and step, of bf16 data-parallel training in a large ring
_GRAPHS = {"ring": "two neighbours in a ring", "pairs": "a partner, drawn anew"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """
    Args:
        apply: how a round updates the model, in a few words.
        tolerates: of links and peers.
        pick: when this is the one to take.
        source: paper and algorithm.
    """

    config: presets.MethodConfig
    codec: str
    apply: str
    tolerates: str
    pick: str
    source: str

    @property
    def name(self) -> str:
        return str(self.config.__struct_config__.tag)

    @property
    def choices(self) -> Choices:
        return presets.spell_out(self.config, PEERS)

    @property
    def every(self) -> str:
        return f"{self.choices.every} at first" if self.choices.tune else str(getattr(self.config, "every", 1))

    @property
    def among(self) -> str:
        choices = self.choices
        if choices.graph is not None:
            name = _GRAPHS.get(choices.graph.graph, choices.graph.graph)
            every = "round" if choices.graph.mean_every == 1 else several(choices.graph.mean_every, "round")
            return f"{name}; all, every {every}"
        return "whoever is ready" if choices.wait == "ready" else "all"

    @property
    def bits(self) -> float:
        """Bits that a peer sends for each parameter and inner step, or at most; it receives as many."""
        spans = layout(named(MODEL, VOCABULARY, 1024))
        traffic = round_traffic(self.choices, tuple(span.shape for span in spans), spans.num_parameters, PEERS)
        return 8 * traffic.sent_nbytes / (spans.num_parameters * self.choices.every)


CATALOGUE = (
    Entry(
        config=presets.DdpConfig(),
        codec="bf16",
        apply="the inner optimizer, on all alike",
        tolerates="fast links only; a peer that dies costs one step",
        pick="peers share a data centre, or the loss must be that of plain training",
        source="Li et al., 2006.15704",
    ),
    Entry(
        config=presets.PowerSgdConfig(),
        codec="4 directions of either side of each matrix, bf16, feedback",
        apply="the inner optimizer, on all alike",
        tolerates="thin links without much delay: one round each step",
        pick="every step must be synchronised and the line is too thin for ddp",
        source="Vogels et al., 1905.13727; by turns: Zhang et al., ICDCS 2023, algorithm 1",
    ),
    Entry(
        config=presets.DeMoConfig(),
        codec="32 of 4096 frequencies of the momentum, bf16, feedback",
        apply="sign SGD",
        tolerates="thin links without much delay: one round each step",
        pick="as for powersgd, but updates do not fit in a few directions; it needs other learning rates",
        source="Peng et al., 2411.19870, algorithm 1",
    ),
    Entry(
        config=presets.FedAvgConfig(),
        codec="bf16",
        apply="SGD, rate 1",
        tolerates="links that can carry a model every few minutes; a sample of the members is enough, data may "
        "differ (proximal)",
        pick="peers keep their own data, or you want a baseline",
        source="McMahan et al., 1602.05629, algorithm 1; proximal: Li et al., 1812.06127",
    ),
    Entry(
        config=presets.DiLoCoConfig(),
        codec="int8",
        apply="SGD-Nesterov",
        tolerates="links that can carry a byte for each parameter every few minutes; a peer that dies costs its "
        "training steps since the last round",
        pick="no other method fits better: the default",
        source="Douillard et al., 2311.08105, algorithm 1",
    ),
    Entry(
        config=presets.AutoConfig(),
        codec="bf16, int8 or e3m0, as links ask for",
        apply="SGD-Nesterov",
        tolerates="links of any speed: training steps from 10 to 500, so that members wait for 5 % of the time",
        pick="you do not know the links, or they change",
        source="as diloco; the ladder is weft's own",
    ),
    Entry(
        config=presets.StreamingConfig(),
        codec="e3m0",
        apply="SGD-Nesterov of one fragment, half mixed in",
        tolerates="thin links and delay: training steps go on meanwhile; a lesser branch is lost when two meet",
        pick="rounds of diloco keep machines waiting",
        source="Douillard et al., 2501.18512, algorithm 2",
    ),
    Entry(
        config=presets.AsyncDiLoCoConfig(),
        codec="int8",
        apply="delayed Nesterov",
        tolerates="peers of any speed: nobody waits",
        pick="peers differ so much that they wait although slower ones get less data",
        source="Liu et al., 2401.09135, algorithm 3",
    ),
    Entry(
        config=presets.CocktailConfig(),
        codec="82 of 410 of 4096 drawn alike, int4, feedback both ways",
        apply="SGD, one step late; what was not sent stays in the local parameters",
        tolerates="thin links, and a step's delay",
        pick="you fine-tune a model and synchronise each step",
        source="Wang et al., ICML 2023, algorithm 1",
    ),
    Entry(
        config=presets.SparseLoCoConfig(),
        codec="64 of 4096, signs, feedback, averaged over those that send them",
        apply="SGD",
        tolerates="the thinnest links; a peer that dies takes with it what it kept back",
        pick="the line is what limits the run",
        source="Sarfi et al., 2508.15706, algorithm 1",
    ),
    Entry(
        config=presets.PulseConfig(),
        codec="what changes a parameter in bf16, as it is in bf16, feedback",
        apply="SGD-Nesterov",
        tolerates="as for diloco; a peer that dies takes with it what it kept back",
        pick="you tune a trained model at a learning rate of 1e-5 or less, as by rewards: most parameters then move "
        "too little to be seen in bf16 (measured with 135 million; diloco sends less of 1 million, or at 1e-4)",
        source="Miahi and Belilovsky, 2602.03839v2, algorithm 2",
    ),
    Entry(
        config=presets.DPsgdConfig(),
        codec="bf16",
        apply="each its own: adapt, then combine",
        tolerates="many peers, each with a line to a few; no replicas: a peer that dies takes its own parameters "
        "with it",
        pick="no line can carry what all send, but every step must be synchronised",
        source="Lian et al., 1705.09056, combining after the step",
    ),
    Entry(
        config=presets.ChocoConfig(),
        codec="64 of 4096, signs; what neighbours lack is kept",
        apply="each its own: towards what neighbours told, in part",
        tolerates="thin lines to a few; a peer that misses a gossip round waits for the next mean",
        pick="as for dpsgd, over thin lines",
        source="Koloskova et al., 1902.00340, algorithm 2",
    ),
    Entry(
        config=presets.NoLoCoConfig(),
        codec="bf16, of delta and parameters",
        apply="Nesterov of each pair, towards its mean",
        tolerates="lines that can carry a model or two every few minutes, to one other peer, however many there are",
        pick="there are so many peers that a round of all would wait too long",
        source="Kolehmainen et al., 2506.10911, section 3",
    ),
)


def table() -> Iterator[tuple[str, ...]]:
    """Yield the heading and the rows."""
    yield "method", "every", "sends", "codec", "among", "update", "bits", "tolerates", "pick it where", "source"
    for each in CATALOGUE:
        codecs = {type(each.choices.codec), type(each.choices.reply)}
        most = "at most " if NonzeroConfig in codecs else ""
        sent = each.choices.send, each.codec, each.among, each.apply, f"{most}{each.bits:.3g}"
        yield each.name, each.every, *sent, each.tolerates, each.pick, each.source
