"""What the encoding of merged parts leaves is kept for what a round counted, and forgotten for all else."""

import torch

from weft.codec.config import SignConfig
from weft.ids import Round
from weft.sync.merge.method import Scope
from weft.sync.merge.reduce import Replies
from weft.sync.method.choices import Choices, SgdConfig

NUM = 64
CHOICES = Choices(every=2, send="delta", apply=SgdConfig(), reply_codec=SignConfig(), reply_feedback=1.0)
HERE = range(NUM)


def test_only_what_a_round_counted_goes_into_the_next() -> None:
    replies, luck = Replies(Scope(NUM)), torch.Generator().manual_seed(1)
    lost, counted, next_mean = (torch.randn(NUM, generator=luck) for _ in range(3))
    replies.encode(lost, HERE, Round(1), CHOICES)  # of an attempt that came to nothing
    part = replies.encode(counted, HERE, Round(1), CHOICES)
    replies.settle(Round(1), [part.digest])
    assert replies._left == {}
    alone = Replies(Scope(NUM))
    alone.settle(Round(1), [alone.encode(counted, HERE, Round(1), CHOICES).digest])
    assert replies.encode(next_mean, HERE, Round(2), CHOICES) == alone.encode(next_mean, HERE, Round(2), CHOICES)
    assert replies.encode(next_mean, HERE, Round(2), CHOICES) != Replies(Scope(NUM)).encode(
        next_mean, HERE, Round(2), CHOICES
    )


def test_what_another_round_counts_is_forgotten() -> None:
    replies = Replies(Scope(NUM))
    part = replies.encode(torch.ones(NUM), HERE, Round(1), CHOICES)
    replies.settle(Round(2), [part.digest])
    assert replies._left == {}
    assert replies._kept == {}
