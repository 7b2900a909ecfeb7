"""Each row of the table against a reference written from its paper, over several rounds of several peers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.codec.config import Fp32Config, TopKConfig
from weft.ids import Round
from weft.sync.merge.method import OUTER, Method, Scope, Shapes
from weft.sync.merge.outer import State, StepContext
from weft.sync.merge.reduce import Merger, Replies, coding_in, decode_parts, encode_payload, reply_codec_in
from weft.sync.method.choices import AdamWConfig, Choices, Factors, LowRankConfig, SgdConfig
from weft.sync.method.presets import DeMoConfig, PulseConfig, SparseLoCoConfig, spell_out
from weft.sync.records.parts import cut

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

NUM, PEERS, ROUNDS = 2 * 4096 + 300, 3, 8
RATE = 0.01  # of the schedule
MATRIX = (64, 128)  # the first numbers: two tiles
Train = Callable[[Tensor, int, int], Tensor]  # outer parameters, round, peer: local parameters


def trained(outer: Tensor, number: int, peer: int) -> Tensor:
    """Return where inner steps would lead: nearer to a point of this peer, and somewhere by chance."""
    own = torch.randn(NUM, generator=torch.Generator().manual_seed(peer))
    luck = torch.randn(NUM, generator=torch.Generator().manual_seed(1000 * number + peer))
    return outer + 0.1 * (own - outer) + 0.03 * luck


def row(choices: Choices, train: Train, shapes: Shapes = (), begin: float = 0.0) -> Tensor:
    """Return the outer parameters after some rounds, by the pieces that peers compute with."""
    method, outer = Method(choices, AdamWConfig(), shapes), torch.full((NUM,), begin)
    scope = Scope(method.num_sent(NUM))
    state, parts = method.init(NUM), cut(scope.num, [1] * PEERS)
    errors: dict[int, Tensor | None] = {}
    replies = [Replies(scope) for _ in range(PEERS)]
    for number in range(1, ROUNDS + 1):
        mergers = [Merger(len(part), coding_in(choices, number)) for part in parts]
        for peer in range(PEERS):
            delta = method.delta(outer, train(outer, number, peer))
            known = {OUTER: outer, **state}
            payload, errors[peer] = encode_payload(method, scope, known, delta, errors.get(peer), parts, number)
            for merger, encoded in zip(mergers, payload, strict=True):
                merger.add(100, encoded)
        results = []
        for reply, merger, part in zip(replies, mergers, parts, strict=True):
            result = reply.encode(merger.merged(), part, Round(number), choices)
            reply.settle(Round(number), [result.digest])
            results.append(result.encoded)
        merged = decode_parts(reply_codec_in(choices, number), results, parts)
        method.apply(outer, state, merged, StepContext(number=number, lr=RATE, round=number))
    return outer


def by_sign(x: Tensor, kept: int) -> Tensor:
    """SparseLoCo's Q: of each chunk the largest, of equal ones the first, as their signs and their mean magnitude."""
    hat = torch.zeros(len(x))
    for start in range(0, len(x), 4096):
        chunk = x[start : start + 4096]
        k = -(-kept * len(chunk) // 4096)
        places = chunk.abs().sort(descending=True, stable=True).indices[:k]
        hat[start + places] = chunk[places].abs().mean().bfloat16().float() * chunk[places].sign()
    return hat


def sparseloco(train: Train, kept: int, beta: float, lr: float, owners_beta: float | None = None) -> Tensor:
    """SparseLoCo, algorithm 1, by its notation.

    Args:
        owners_beta: the mean over senders is sent by Q, too, and owners keep what that leaves, which is no part of the
            paper; None: it is sent whole.
    """
    theta, e, kept_by_owners = torch.zeros(NUM), [torch.zeros(NUM) for _ in range(PEERS)], torch.zeros(NUM)
    for t in range(1, ROUNDS + 1):
        sent = []
        for r in range(PEERS):
            delta = theta - train(theta, t, r)
            e[r] = beta * e[r] + delta
            hat = by_sign(e[r], kept)
            e[r] = e[r] - hat
            sent.append(hat)
        stacked = torch.stack(sent).double()
        mean = (stacked.sum(0) / (stacked != 0).sum(0).clamp(min=1)).float()
        if owners_beta is not None:
            whole = owners_beta * kept_by_owners + mean
            mean = by_sign(whole, kept)
            kept_by_owners = whole - mean
        theta = theta - lr * mean
    return theta


@pytest.mark.full
def test_sparseloco_is_its_paper() -> None:
    config = SparseLoCoConfig(feedback=0.95, lr=0.7, reply_codec=Fp32Config(), reply_feedback=None)
    found, wanted = row(spell_out(config, PEERS), trained), sparseloco(trained, 64, 0.95, 0.7)
    assert torch.count_nonzero(wanted) > 0.05 * NUM
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("owners_beta", [1.0, 0.5])
def test_sparseloco_with_sparse_replies_keeps_at_owners_what_they_leave(owners_beta: float) -> None:
    config = SparseLoCoConfig(feedback=0.95, lr=0.7, reply_feedback=owners_beta)
    found, wanted = row(spell_out(config, PEERS), trained), sparseloco(trained, 64, 0.95, 0.7, owners_beta)
    assert torch.count_nonzero(wanted) > 0.05 * NUM
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def pulseloco(train: Train, lr: float, momentum: float) -> tuple[Tensor, list[float]]:
    """PULSELoCo, algorithm 2, with torch's own bf16 and its Nesterov; and of each payload which share is sent."""
    theta, e, shares = torch.zeros(NUM), [torch.zeros(NUM) for _ in range(PEERS)], []
    theta += 0.05
    optimizer = torch.optim.SGD([theta], lr=lr, momentum=momentum, nesterov=True)
    for t in range(1, ROUNDS + 1):
        sent = []
        for r in range(PEERS):
            s = e[r] + (theta - train(theta, t, r))
            is_seen = (theta - s).bfloat16() != theta.bfloat16()
            hat = torch.where(is_seen, s, 0.0).bfloat16().float()
            e[r] = s - hat
            sent.append(hat)
            shares.append(float(is_seen.float().mean()))
        theta.grad = (sum(each.double() for each in sent) / PEERS).float().bfloat16().float()
        optimizer.step()
    return theta, shares


def test_pulse_is_its_paper() -> None:
    def fine_tuned(outer: Tensor, number: int, peer: int) -> Tensor:
        luck = torch.randn(NUM, generator=torch.Generator().manual_seed(1000 * number + peer))
        return outer + 1e-4 * luck

    choices = spell_out(PulseConfig(lr=0.7, momentum=0.8), PEERS)
    found = row(choices, fine_tuned, begin=0.05)
    wanted, shares = pulseloco(fine_tuned, 0.7, 0.8)
    assert 0.1 < sum(shares) / len(shares) < 0.9
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(found, torch.full((NUM,), 0.05), rtol=0, atol=1e-5)


def sparseloco_of_tiles(train: Train) -> Tensor:
    """The same on a matrix whose two tiles lie beside each other: its chunks are read by rows of tiles."""

    def by_tiles(x: Tensor) -> Tensor:
        left, right = x[: 64 * 128].view(64, 128).split(64, dim=1)
        return torch.cat([left.flatten(), right.flatten(), x[64 * 128 :]])

    def by_rows(x: Tensor) -> Tensor:
        left, right = x[: 64 * 128].view(2, 64, 64)
        return torch.cat([torch.cat([left, right], dim=1).flatten(), x[64 * 128 :]])

    return by_rows(sparseloco(lambda x, t, r: by_tiles(train(by_rows(x), t, r)), 64, 0.95, 0.7))


@pytest.mark.full
def test_sparseloco_chooses_in_each_tile_of_a_matrix() -> None:
    config = SparseLoCoConfig(feedback=0.95, lr=0.7, reply_codec=Fp32Config(), reply_feedback=None)
    found = row(spell_out(config, PEERS), trained, (MATRIX,))
    torch.testing.assert_close(found, sparseloco_of_tiles(trained), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, row(spell_out(config, PEERS), trained))


def demo(gradient: Train, kept: int, beta: float) -> Tensor:
    """DeMo, algorithm 1, by its notation: a matrix of two tiles, and numbers in runs of 64, the last one short."""
    places = torch.arange(64, dtype=torch.float64)
    d = torch.cos(torch.pi / 64 * torch.outer(places, places + 0.5)) * (2 / 64) ** 0.5
    d[0] /= 2**0.5

    def encoded(x: Tensor) -> list[Tensor]:
        tiles, rest = x[: 64 * 128].view(64, 2, 64).transpose(0, 1), x[64 * 128 :]
        whole = len(rest) // 64 * 64
        return [
            *((d @ tile @ d.T).flatten() for tile in tiles),
            torch.cat([(rest[:whole].view(-1, 64) @ d.T).flatten(), rest[whole:]]),
        ]

    def decoded(chunks: list[Tensor]) -> Tensor:
        left, right = (d.T @ chunk.view(64, 64) @ d for chunk in chunks[:2])
        whole = len(chunks[2]) // 64 * 64
        rest = torch.cat([(chunks[2][:whole].view(-1, 64) @ d).flatten(), chunks[2][whole:]])
        return torch.cat([torch.cat([left, right], dim=1).flatten(), rest])

    theta, m = torch.zeros(NUM, dtype=torch.float64), [torch.zeros(NUM, dtype=torch.float64) for _ in range(PEERS)]
    for t in range(1, ROUNDS + 1):
        sent = []
        for r in range(PEERS):
            m[r] = beta * m[r] + gradient(theta.float(), t, r)
            q = []
            for chunk in encoded(m[r]):
                k = -(-kept * len(chunk) // 4096)
                largest = chunk.abs().topk(k).indices
                q.append(torch.zeros_like(chunk).index_copy(0, largest, chunk[largest]))
            m[r] = m[r] - decoded(q)
            sent.append(q)
        mean = []
        for chunks in zip(*sent, strict=True):
            stacked = torch.stack(chunks)
            mean.append(stacked.sum(0) / (stacked != 0).sum(0).clamp(min=1))
        theta = theta - RATE * decoded(mean).sign()
    return theta.float()


def smooth_gradient(outer: Tensor, number: int, peer: int) -> Tensor:
    return outer - trained(outer, number, peer)


def test_demo_is_its_paper() -> None:
    codec = TopKConfig(kept=32, values="fp32")
    config = DeMoConfig(codec=codec, momentum=0.9, reply_codec=Fp32Config(), reply_feedback=None)
    found, wanted = row(spell_out(config, PEERS), smooth_gradient, (MATRIX,)), demo(smooth_gradient, 32, 0.9)
    # A sign is of something: where the mean is about zero, fp32 and float64 may take either side.
    assert float((found - wanted).abs().gt(1e-6).float().mean()) < 0.01
    assert float(wanted.abs().max()) > 3 * RATE


@pytest.mark.full
def test_demos_replies_have_room_for_all_that_is_sent() -> None:
    dense = row(spell_out(DeMoConfig(reply_codec=Fp32Config(), reply_feedback=None), PEERS), smooth_gradient, (MATRIX,))
    sparse = row(spell_out(DeMoConfig(), PEERS), smooth_gradient, (MATRIX,))
    assert float((dense - sparse).abs().gt(1e-6).float().mean()) < 0.05


def acp_sgd(gradient: Train, shapes: Shapes, rank: int, start: State, *, has_both: bool) -> Tensor:
    """ACP-SGD, algorithm 1, by its notation, beside SGD: matrices by turns, the rest as it is. Or both turns at once:
    what P leaves of M, Q takes; (I - P P^T) M (I - Q Q^T) is the error."""
    theta, r = torch.zeros(NUM, dtype=torch.float64), rank
    places, at = [], [0, 0, 0]
    for shape in shapes:
        n, m = shape[0], shape[-1]
        places.append((slice(at[0], at[0] + n * m), n, m))
        at = [at[0] + n * m, at[1] + n * r, at[2] + m * r]
    p = list(start["left"].double().split([n * r for _, n, _ in places]))
    q = list(start["right"].double().split([m * r for _, _, m in places]))
    p = [x.view(-1, r) for x in p]
    q = [x.view(-1, r) for x in q]
    e = [torch.zeros(NUM, dtype=torch.float64) for _ in range(PEERS)]
    for t in range(1, ROUNDS + 1):
        whole = [e[i] + gradient(theta.float(), t, i) for i in range(PEERS)]
        mean = sum(whole) / PEERS  # of what has no factors
        for i in range(PEERS):
            e[i] = torch.zeros(NUM, dtype=torch.float64)
        for number, (here, n, m) in enumerate(places):
            matrices = [each[here].view(n, m) for each in whole]
            if has_both:
                ps, qs = [x @ q[number] for x in matrices], [x.T @ p[number] for x in matrices]
                on_p, on_q = p[number] @ p[number].T, q[number] @ q[number].T
                approx = [x - (torch.eye(n) - on_p) @ x @ (torch.eye(m) - on_q) for x in matrices]
                hat = sum(approx) / PEERS
                p[number], q[number] = (torch.linalg.qr(sum(each) / PEERS)[0] for each in (ps, qs))
            elif t % 2:
                factors = [x @ q[number] for x in matrices]
                approx = [f @ q[number].T for f in factors]
                hat = sum(factors) / PEERS @ q[number].T
                p[number] = torch.linalg.qr(sum(factors) / PEERS)[0]
            else:
                factors = [x.T @ p[number] for x in matrices]
                approx = [p[number] @ f.T for f in factors]
                hat = p[number] @ (sum(factors) / PEERS).T
                q[number] = torch.linalg.qr(sum(factors) / PEERS)[0]
            for i in range(PEERS):
                e[i][here] = (matrices[i] - approx[i]).reshape(-1)
            mean[here] = hat.reshape(-1)
        theta = theta - 0.3 * mean
    return theta.float()


@pytest.mark.parametrize("factors", ["both", "by_turns"])
def test_powersgd_is_its_paper_by_turns_or_both_at_once(factors: Factors) -> None:
    choices = Choices(
        every=1,
        send="gradient",
        apply=SgdConfig(lr=0.3),
        codec=Fp32Config(),
        basis=LowRankConfig(rank=3, factors=factors),
        feedback=1.0,
    )
    shapes = ((64, 96), (40, 30))
    start = Method(choices, AdamWConfig(), shapes).init(NUM)
    found = row(choices, smooth_gradient, shapes)
    wanted = acp_sgd(smooth_gradient, shapes, 3, start, has_both=factors == "both")
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert float(wanted.abs().max()) > 0.1
