"""The codec of a group's mean has room for all that its members kept."""

import pytest
import torch

from weft.codec.build import build
from weft.codec.config import CodecConfig, RandomKConfig, TopKConfig
from weft.sync.merge.reduce import group_codec_in
from weft.sync.method.choices import Choices, SgdConfig

NUM = 2 * 4096 + 100  # the last chunk is short, and keeps few
ROUND = 7


@pytest.mark.parametrize(
    "codec",
    [
        TopKConfig(kept=64, values="bf16"),
        RandomKConfig(kept=410, largest=41, values="fp32"),
        TopKConfig(kept=2000, values="bf16"),
    ],
    ids=["top_k", "random_k", "nearly all"],
)
@pytest.mark.parametrize("num_peers", [2, 3, 7])
def test_the_mean_of_a_group_keeps_what_each_of_it_kept(codec: CodecConfig, num_peers: int) -> None:
    choices = Choices(every=5, send="delta", apply=SgdConfig(), codec=codec, feedback=0.95, reply_feedback=0.95)
    theirs, total = build(codec, ROUND), torch.zeros(NUM)
    for seed in range(num_peers):
        vector = torch.randn(NUM, generator=torch.Generator().manual_seed(seed))
        total += theirs.decode(theirs.encode(vector), NUM)
    of_group = group_codec_in(choices, ROUND, num_peers)
    data = of_group.encode(total)
    assert len(data) == of_group.nbytes(NUM)
    assert torch.count_nonzero(of_group.decode(data, NUM)) == torch.count_nonzero(total)
