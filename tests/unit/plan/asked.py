"""A question small enough to reckon by hand."""

from typing import Any

from weft.model.config import ModelConfig, named
from weft.plan.profiles import device
from weft.plan.question import Machines, Question, cluster_of
from weft.plan.timing import Line
from weft.run.config import TrainConfig
from weft.sync.method.presets import DiLoCoConfig, MethodConfig, spell_out
from weft.sync.method.schedule import ConstantConfig

MODEL = named("35m", 32_000, 1024)
HOME = Line(up_bps=20e6, down_bps=100e6, delay_s=0.01)


def train(**fields: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "seq_len": 1024,
        "batch_size": 8,
        "tokens": 1_000_000_000,
        "schedule": ConstantConfig(),
        "evaluate_every": 0,
    }
    return TrainConfig(**(usual | fields))


def machines(name: str = "peers", count: int = 4, **fields: Any) -> Machines:
    usual: dict[str, Any] = {"line": HOME, "tokens_per_s": 20_000.0, "watts": 400.0}
    return Machines(name=name, count=count, **(usual | fields))


def question(
    *kinds: Machines, method: MethodConfig | None = None, model: ModelConfig = MODEL, **fields: Any
) -> Question:
    found = kinds or (machines(),)
    own = fields.pop("train", train())
    usual: dict[str, Any] = {"has_even_leases": True, "price_per_kwh": 0.25, "idle_share": 0.3}
    return Question(
        model=model,
        train=own,
        choices=spell_out(method or DiLoCoConfig(every=30), sum(kind.count for kind in found)),
        machines=found,
        cluster=cluster_of(device("h100-sxm"), 8, model, own, 2.0),
        **(usual | fields),
    )
