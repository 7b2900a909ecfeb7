"""Each row of the table against a reference written from its paper, over several rounds of several peers."""

from collections.abc import Callable

import torch
from torch import Tensor

from weft.codec import Fp32Config
from weft.ids import Round
from weft.sync import feedback
from weft.sync.choices import AdamWConfig, Choices, SparseLoCoConfig, spell_out
from weft.sync.coding import codec_in, coding_in, reply_codec_in
from weft.sync.method import Method
from weft.sync.outer import StepContext
from weft.sync.reduce import Merger, cut, decode_parts
from weft.sync.replies import Replies

NUM, PEERS, ROUNDS = 2 * 4096 + 300, 3, 8
Train = Callable[[Tensor, int, int], Tensor]  # outer parameters, round, peer: local parameters


def trained(outer: Tensor, number: int, peer: int) -> Tensor:
    """Return where inner steps would lead: nearer to a point of this peer, and somewhere by chance."""
    own = torch.randn(NUM, generator=torch.Generator().manual_seed(peer))
    luck = torch.randn(NUM, generator=torch.Generator().manual_seed(1000 * number + peer))
    return outer + 0.1 * (own - outer) + 0.03 * luck


def row(choices: Choices, train: Train) -> Tensor:
    """Return the outer parameters after some rounds, by the pieces that peers compute with."""
    method, outer = Method(choices, AdamWConfig()), torch.zeros(NUM)
    state, parts = method.init(NUM), cut(NUM, [1] * PEERS)
    errors: dict[int, Tensor] = {}
    replies = [Replies(NUM) for _ in range(PEERS)]
    for number in range(1, ROUNDS + 1):
        mergers = [Merger(len(part), coding_in(choices, number)) for part in parts]
        for peer in range(PEERS):
            vector = method.contribution(outer, train(outer, number, peer))
            assert choices.feedback is not None
            codec = codec_in(choices, number)
            payload, errors[peer] = feedback.encode(codec, vector, parts, errors.get(peer), choices.feedback)
            for merger, encoded in zip(mergers, payload, strict=True):
                merger.add(100, encoded)
        results = []
        for reply, merger, part in zip(replies, mergers, parts, strict=True):
            result = reply.encode(merger.merged(), part, Round(number), choices)
            reply.settle(Round(number), [result.digest])
            results.append(result.encoded)
        merged = decode_parts(reply_codec_in(choices, number), results, parts)
        method.apply(outer, state, merged, StepContext(number=number))
    return outer


def sparseloco(train: Train, kept: int, beta: float, lr: float) -> Tensor:
    """SparseLoCo, algorithm 1, by its notation; Q is the sign and the mean magnitude of a chunk."""
    theta, e = torch.zeros(NUM), [torch.zeros(NUM) for _ in range(PEERS)]
    for t in range(1, ROUNDS + 1):
        sent = []
        for r in range(PEERS):
            delta = theta - train(theta, t, r)
            e[r] = beta * e[r] + delta
            hat = torch.zeros(NUM)
            for start in range(0, NUM, 4096):
                chunk = e[r][start : start + 4096]
                k = -(-kept * len(chunk) // 4096)
                places = chunk.abs().topk(k).indices
                scale = chunk[places].abs().mean().bfloat16().float()
                hat[start + places] = scale * chunk[places].sign()
            e[r] = e[r] - hat
            sent.append(hat)
        stacked = torch.stack(sent)
        theta = theta - lr * stacked.sum(0) / (stacked != 0).sum(0).clamp(min=1)
    return theta


def test_sparseloco_is_its_paper() -> None:
    config = SparseLoCoConfig(feedback=0.95, lr=0.7, reply_codec=Fp32Config(), reply_feedback=None)
    found, wanted = row(spell_out(config, PEERS), trained), sparseloco(trained, 64, 0.95, 0.7)
    assert torch.count_nonzero(wanted) > 0.05 * NUM
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_sparseloco_with_sparse_replies_moves_where_it_would_with_dense_ones() -> None:
    dense = row(spell_out(SparseLoCoConfig(reply_codec=Fp32Config(), reply_feedback=None), PEERS), trained)
    sparse = row(spell_out(SparseLoCoConfig(), PEERS), trained)
    cosine = torch.nn.functional.cosine_similarity(dense, sparse, dim=0)
    assert 0.5 < float(cosine) < 0.999  # not all has been sent yet
