"""What a plan is asked: a run, who would train it, and what it is held against."""

from dataclasses import dataclass, field

from weft.cost import training as cost
from weft.cost.audits import HASH_S
from weft.errors import ConfigError
from weft.model.config import ModelConfig, num_parameters
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.plan.profiles import Device, known
from weft.plan.timing import Line
from weft.run.config import TrainConfig
from weft.run.trust import FEWEST, AuditedTrust, MembersTrust, TrustConfig, check
from weft.sync.method.choices import Choices
from weft.training.device import decoder

# What AdamW reads and writes of each parameter: gradient twice (norm, step), parameter and two moments both ways.
OPTIMIZER_NBYTES = 32


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Peers that are alike.

    Args:
        tokens_per_s: of inner steps, of one peer, while it trains.
        watts: of one of them, while it trains.
        memory_nbytes: of the device it trains on; None: not known.
        is_gpu: parameters and moments lie on a device of their own.
        price_per_hour: of renting one; 0: only its electricity is paid.
        crowding: peers per core that serves them: above 1 where several share a machine.
        is_processor_free: what goes on beside inner steps takes no time, as in the simulator.
        hash_s: of a byte of a state.
    """

    name: str
    count: int
    line: Line
    tokens_per_s: float
    watts: float = 0.0
    memory_nbytes: float | None = None
    is_gpu: bool = False
    is_half: bool = False
    price_per_hour: float = 0.0
    crowding: float = 1.0
    is_processor_free: bool = False
    hash_s: float = HASH_S


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one data centre that train the same model by bf16 ring DDP.

    Args:
        tokens_per_s: of one GPU.
        fabric_bps: between two of them.
        watts: of one, with its share of the machine around it.
        pue: what the building draws, by what its machines draw.
    """

    name: str
    count: int
    tokens_per_s: float
    fabric_bps: float
    watts: float
    pue: float
    price_per_hour: float


@dataclass(frozen=True, kw_only=True)
class Question:
    """One run among some machines.

    Args:
        has_even_leases: all members are leased as much data; else slower ones less, so that all finish together.
        idle_share: of a machine's watts, while it waits.
        electors: peers at most that vote; the others contribute through them.
        has_reward: peers learn from answers that they draw.
        trust: whether members audit each other.
    """

    model: ModelConfig
    train: TrainConfig
    choices: Choices
    machines: tuple[Machines, ...]
    cluster: Cluster
    has_even_leases: bool
    price_per_kwh: float
    idle_share: float
    electors: int = MAX_MEMBERS
    has_reward: bool = False
    trust: TrustConfig = field(default_factory=MembersTrust)

    @property
    def audits(self) -> AuditedTrust | None:
        """Return how members audit each other; None: they do not, or cannot: the method, so few, so many."""
        if not isinstance(self.trust, AuditedTrust) or not FEWEST <= self.num_peers <= self.electors:
            return None
        try:
            check(self.trust, self.choices)
        except ConfigError:
            return None
        return self.trust

    @property
    def num_electors(self) -> int:
        return min(self.num_peers, self.electors)

    @property
    def num_peers(self) -> int:
        return sum(each.count for each in self.machines)

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.seq_len


def tokens_per_s(
    device: Device, model: ModelConfig, train: TrainConfig, efficiency: float | None = None, *, is_exact: bool = False
) -> float:
    """Return the speed of inner steps on a device: its matrix products, and the optimizer's way through its memory.

    Args:
        efficiency: share of its products that training uses; None: as `profiles.toml` has it for its kind.
        is_exact: they are computed in exact numbers.
    """
    defaults = known().defaults
    usual = defaults.cpu_efficiency if device.kind == "cpu" else defaults.gpu_efficiency
    num_tokens = train.batch_size * train.seq_len
    flops = num_tokens * cost.flops_per_token(decoder(model), train.seq_len)
    products_s = flops / (1e12 * device.tflops * (efficiency or usual))
    optimizer_s = OPTIMIZER_NBYTES * num_parameters(model) / (1e9 * device.bandwidth_gbs)
    return num_tokens / ((products_s + optimizer_s) * (cost.EXACT_TIMES if is_exact else 1.0))


def cluster_of(device: Device, count: int, model: ModelConfig, train: TrainConfig, price_per_hour: float) -> Cluster:
    """Return so many of a device in a data centre as `profiles.toml` assumes it."""
    defaults = known().defaults
    is_usual = device.name == defaults.cluster_device
    return Cluster(
        name=device.name,
        count=count,
        tokens_per_s=tokens_per_s(device, model, train),
        fabric_bps=1e9 * defaults.cluster_fabric_gbit,
        watts=defaults.cluster_watts if is_usual else device.watts + defaults.host_watts,
        pue=defaults.cluster_pue,
        price_per_hour=price_per_hour,
    )
