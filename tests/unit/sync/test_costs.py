"""What a member holds of a method, by hand. benchmarks/memory.py compares it with a process."""

import pytest

from weft.codec.config import Bf16Config, Int4Config
from weft.cost import training as cost
from weft.sync.costs import peer_memory
from weft.sync.method.choices import AdamWConfig, Choices, GraphConfig, InnerSgdConfig, OptimizerConfig
from weft.sync.method.presets import (
    AsyncDiLoCoConfig,
    ChocoConfig,
    DdpConfig,
    DeMoConfig,
    DiLoCoConfig,
    DPsgdConfig,
    MethodConfig,
    NoLoCoConfig,
    PowerSgdConfig,
    SparseLoCoConfig,
    spell_out,
)

SHAPES = ((512, 512), (256, 1024), (128,))
NUM = 512 * 512 + 256 * 1024 + 128
VECTOR = 4 * NUM
PEERS = 4
ADAMW = AdamWConfig()


def of(config: MethodConfig, optimizer: OptimizerConfig | None = ADAMW) -> cost.Memory:
    return peer_memory(spell_out(config, PEERS), optimizer, SHAPES, NUM, PEERS, num_rounds=1, activations=0)


@pytest.mark.parametrize(
    ("config", "num_vectors"),
    [
        (DdpConfig(), 2 + 2),  # trained and gradient; moments
        (DiLoCoConfig(), 2 + 2 + 2),  # and outer, with its momentum
        (AsyncDiLoCoConfig(), 2 + 2 + 3),  # and what is delayed
        (SparseLoCoConfig(), 2 + 2 + 1 + 3),  # no momentum; errors: kept, under way, of replies
        (DeMoConfig(), 2 + 0 + 3),  # its steps are signs; its momentum is what was not sent
        (PowerSgdConfig(), 2 + 2 + 2),
        (DPsgdConfig(), 2 + 2 + 1 + 4),
        (ChocoConfig(), 2 + 2 + 1 + 4 + 6),  # of itself and two neighbours in the ring, before and after
        (NoLoCoConfig(), 2 + 2 + 1 + 10),
    ],
    ids=lambda value: value.__struct_config__.tag if hasattr(value, "__struct_config__") else "",
)
def test_vectors_that_a_method_keeps(config: MethodConfig, num_vectors: int) -> None:
    memory = of(config)
    assert memory.always_nbytes - memory.merged - memory.kept == num_vectors * VECTOR


def test_the_inner_optimizer_is_as_large_as_its_moments() -> None:
    assert of(DiLoCoConfig()).inner_optimizer == 2 * VECTOR
    assert of(DiLoCoConfig(), InnerSgdConfig(momentum=0.9)).inner_optimizer == VECTOR
    assert of(DiLoCoConfig(), InnerSgdConfig()).inner_optimizer == 0
    assert of(DiLoCoConfig(), None).inner_optimizer == 0  # of a loop that is not weft's


def test_sparse_methods_merge_with_the_weight_of_senders_and_what_replies_have_left() -> None:
    owned = cost.part_size(NUM, PEERS)
    dense = Choices(every=30, send="delta", apply=spell_out(SparseLoCoConfig(), PEERS).apply, codec=Int4Config())
    payloads = sum(of(SparseLoCoConfig()).merge - extra for extra in ((16 + 8 + 8) * owned + VECTOR,))
    assert 0 < payloads < owned  # three of 64 in 4096
    memory = peer_memory(dense, ADAMW, SHAPES, NUM, PEERS, num_rounds=1, activations=0)
    assert memory.merge - 16 * owned == 3 * (owned // 2 + 2 * (owned // 256))


def test_what_is_projected_is_merged_and_kept_as_small_as_it_is_sent() -> None:
    small = of(PowerSgdConfig(rank=1))
    assert small.kept < VECTOR / 50
    assert small.merge < VECTOR + VECTOR / 10  # a copy, and little to merge


def test_who_has_neighbours_merges_as_for_a_mean() -> None:
    choices = spell_out(DPsgdConfig(reply_codec=Bf16Config()), PEERS)
    assert isinstance(choices.among, GraphConfig)
    assert of(DPsgdConfig()).kept == 2 * NUM
