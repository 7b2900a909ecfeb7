"""Closed forms against what the rooms really make: encoded bytes, signed messages, saved activations, layouts."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import Bf16Config, Fp32Config, Int4Config, Int8Config, TopKConfig
from weft.cost import training as cost
from weft.cost.training import Decoder, Link, Traffic
from weft.data.assign import Lease
from weft.ids import Digest, PeerId
from weft.keys import Identity
from weft.model.config import ModelConfig, named, num_parameters
from weft.model.transformer import SectionModule, Transformer
from weft.net.messages import BlobHeader, BlobRequest
from weft.net.transport.frame import encode_frame
from weft.peer.chain import RESULTS_NBYTES
from weft.sync.merge.reduce import encode_parts
from weft.sync.records import messages
from weft.sync.records.messages import counted
from weft.sync.records.parts import ALIGNMENT, cut
from weft.training.numerics.decoder import loss as exact_loss
from weft.wire import encode, seal

FP32, BF16, INT8 = build(Fp32Config()), build(Bf16Config()), build(Int8Config())
CODECS: list[Codec] = [FP32, BF16, INT8, build(Int4Config(block=64)), build(TopKConfig())]


def decoder(config: ModelConfig) -> Decoder:
    return Decoder(
        num_parameters=num_parameters(config),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        width=config.width,
        q_width=config.q_width,
        kv_width=config.kv_width,
        ffn_width=config.ffn_width,
        has_qk_norm=config.has_qk_norm,
    )


# --- bytes ---


def reduced(num: int, num_owned: int, num_peers: int, payload: cost.Encoding, reply: cost.Encoding) -> Traffic:
    brought = cost.contribute_traffic(num, num_owned, num_peers, payload)
    return brought + cost.result_traffic(num, num_owned, num_peers, reply)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("reply_codec", CODECS[:3])
@pytest.mark.parametrize("uplinks", [[1, 1], [1, 1, 1, 1], [5, 0, 2]])
def test_a_reduce_is_what_the_parts_encode_to(codec: Codec, reply_codec: Codec, uplinks: Sequence[int]) -> None:
    num, num_peers = 9 * ALIGNMENT + 100, len(uplinks)
    parts = cut(num, uplinks)
    payloads = [len(data) for data in encode_parts(codec, torch.ones(num), parts)]
    replies = [len(data) for data in encode_parts(reply_codec, torch.ones(num), parts)]
    for me, part in enumerate(parts):
        others = [i for i in range(num_peers) if i != me]
        expected = Traffic(
            sum(payloads[i] for i in others) + len(others) * replies[me],
            len(others) * payloads[me] + sum(replies[i] for i in others),
        )
        assert reduced(num, len(part), num_peers, codec, reply_codec) == expected


@pytest.mark.parametrize("codec", CODECS)
def test_exchange_traffic_is_what_whole_payloads_encode_to(codec: Codec) -> None:
    num = 9 * ALIGNMENT + 100
    nbytes = sum(len(data) for data in encode_parts(codec, torch.ones(num), cut(num, [1, 1, 1])))
    assert cost.exchange_traffic(num, 3, codec) == Traffic(2 * nbytes, 2 * nbytes)


@pytest.mark.parametrize(("num", "num_peers"), [(0, 3), (100, 3), (9 * ALIGNMENT + 100, 4), (25_000_000, 7)])
def test_part_sizes_are_the_sizes_of_an_equal_cut(num: int, num_peers: int) -> None:
    assert [cost.part_size(num, num_peers, i) for i in range(num_peers)] == [len(p) for p in cut(num, [1] * num_peers)]


def test_ring_ddp_by_hand() -> None:
    # 4 peers, 1000 values: 3/4 of the vector twice each way, 2 bytes a value; 30 steps.
    assert cost.ring_ddp_traffic(1000, 4, 30) == Traffic(30 * 3000, 30 * 3000)
    assert cost.ring_ddp_traffic(1000, 1) == Traffic(0, 0)


def test_one_bf16_reduce_costs_what_one_ring_all_reduce_does() -> None:
    num = 8 * ALIGNMENT
    assert reduced(num, num // 4, 4, BF16, BF16) == cost.ring_ddp_traffic(num, 4)


def test_int8_every_30_steps_is_about_60_times_less_than_ring_ddp() -> None:
    num = 1000 * ALIGNMENT
    diloco = reduced(num, num // 4, 4, INT8, INT8).sent_nbytes
    assert cost.ring_ddp_traffic(num, 4, 30).sent_nbytes / diloco == pytest.approx(60 / (1 + 4 / 256))


class Network:
    """Adds up the frames of one round as its machine would send them; the leader is the first member."""

    def __init__(self, num_peers: int) -> None:
        self.identity = Identity.generate()
        self.peers = [PeerId(f"{i:064x}") for i in range(num_peers)]
        self.digest = Digest("ab" * 32)
        self.sent = 0

    def send(self, message: Any, count: int) -> None:
        signed = seal(self.identity, note(self, message))
        # What a note adds: its own tag, the method's name and the body's length.
        self.sent += count * (len(encode_frame(encode(signed))) + 40)


def note(net: Network, message: Any) -> messages.RoundNote:
    return messages.RoundNote(branch=messages.BranchId(net.digest), round=messages.Round(1000), message=message)


@pytest.mark.parametrize("num_peers", [2, 4, 8, 16])
def test_control_bytes_are_those_of_a_rounds_messages(num_peers: int) -> None:
    net = Network(num_peers)
    others, digests = num_peers - 1, (net.digest,) * num_peers
    contributions = tuple(
        messages.Contribution(peer=peer, tokens=messages.Tokens(123_456), parts=digests) for peer in net.peers
    )
    manifest = messages.Manifest(
        run=messages.RunId(net.digest),
        branch=messages.BranchId(net.digest),
        round=messages.Round(1000),
        attempt=messages.Attempt(0),
        leader=net.peers[0],
        previous=net.digest,
        contributions=tuple(map(counted, contributions)),
        parts=tuple(messages.PartResult(owner=peer, result=net.digest) for peer in net.peers),
        members=tuple(net.peers),
        uplinks=(16,) * len(net.peers),
        joined=(),
        left=(),
        leases=tuple(Lease(peer=peer, start=100_000, stop=200_000) for peer in net.peers),
        cursor=1_000_000,
        committed_tokens=messages.Tokens(123_456_789),
        acts=(),
        charter=net.digest,
    )
    zero = messages.Attempt(0)
    net.send(messages.Ready(tokens=messages.Tokens(123_456), parts=digests), num_peers * others)
    net.send(messages.Merged(attempt=zero, revision=0, part=0, result=net.digest), num_peers * others)
    net.send(messages.Holding(attempt=zero, revision=0, results=digests), others)
    net.send(messages.Accept(attempt=zero, manifest=net.digest), others)
    owners = tuple(net.peers)
    net.send(messages.Collect(attempt=zero, revision=0, contributions=contributions, owners=owners), others)
    net.send(messages.Propose(attempt=zero, manifest=manifest), others)
    vote = seal(net.identity, note(net, messages.Accept(attempt=zero, manifest=net.digest)))
    majority = num_peers // 2 + 1
    certificate = messages.Certificate(attempt=zero, manifest=manifest, votes=(vote,) * majority, farewells=())
    net.sent += (others + num_peers - majority) * (len(encode_frame(encode(certificate))) + 60)
    for record in (BlobRequest(digest=net.digest), BlobHeader(nbytes=10**6)):  # payload and result of each part
        net.sent += 2 * num_peers * others * len(encode_frame(encode(record)))
    assert cost.control_traffic(num_peers).sent_nbytes == pytest.approx(net.sent / num_peers, rel=0.05)


def test_heartbeats_add_up_with_time_and_peers() -> None:
    quiet, busy = cost.control_traffic(5), cost.control_traffic(5, round_s=60.0)
    assert busy.sent_nbytes - quiet.sent_nbytes == 30 * 4 * cost.HEARTBEAT_NBYTES


# --- seconds ---


def test_seconds_by_hand() -> None:
    link = Link(up_bps=20e6, down_bps=100e6)
    assert link.seconds(Traffic(2_500_000, 2_500_000)) == 1.0  # the uplink is the narrow side
    assert link.seconds(Traffic(0, 2_500_000)) == 0.2
    assert cost.work_s(30, 1000, 6e6, 1e12) == pytest.approx(0.18)
    assert cost.gigabytes_per_day(10_000_000, 86.4) == pytest.approx(10.0)


def test_traffic_adds_and_multiplies() -> None:
    assert (Traffic(1, 2) + Traffic(3, 4)).times(2) == Traffic(8, 12)


# --- the model ---


@pytest.mark.parametrize("size", ["nano", "150m", "7b"])
def test_matrices_are_all_parameters_but_norms_and_embedding(size: str) -> None:
    config = named(size, 1000, 128)
    shape = decoder(config)
    norms = (2 * config.num_layers + 1) * config.width
    tables = config.vocab_size * config.width * (1 if config.is_tied else 2)
    assert shape.num_layers * shape.layer_matrices == shape.num_parameters - norms - tables


def test_flops_are_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = named("nano", 257, 64)
    model, tokens = Transformer(config), torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).backward()
    # Attention apart: what torch counts of it depends on the kernel the CPU chooses.
    shape = decoder(config)
    attention = 12 * shape.num_layers * shape.q_width * 64
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    assert counted / 128 == pytest.approx(cost.flops_per_token(shape, 64) - attention, rel=0.01)


def saved_nbytes(model: Transformer, micro_batch: int, seq_len: int, *, is_half: bool) -> int:
    """Return the bytes of the distinct storages that autograd keeps for the backward pass, parameters apart."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # holding them keeps addresses from being used again

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_half),
    ):
        model.loss(tokens, tokens)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_heads": 2}, {"has_qk_norm": True}, {"num_layers": 1, "is_tied": False}], ids=repr
)
def test_activations_are_what_autograd_keeps(is_half: bool, changes: dict[str, Any]) -> None:
    fields = {
        "vocab_size": 257,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 4,
        "width": 128,
        "ffn_width": 384,
        "max_seq_len": 64,
        "is_tied": True,
    }
    config = ModelConfig(**(fields | changes))
    kept = saved_nbytes(Transformer(config), 4, 64, is_half=is_half)
    predicted = cost.activation_nbytes(decoder(config), 4, 64, is_half=is_half)
    gradients = 2 * 4 * 257 * 4 * 64  # of log-probabilities and logits: made by the backward pass, not kept for it
    assert 12 * 257 > 7 * 384  # so the loss decides, not SwiGLU
    assert kept == pytest.approx(predicted - gradients, rel=0.03)


@pytest.mark.parametrize(
    ("vocab_size", "is_half", "has_recompute"),
    [(257, False, False), (257, True, True), (257, False, True), (2000, False, False), (2000, True, True)],
)
def test_activations_are_the_peak_of_a_step(vocab_size: int, is_half: bool, has_recompute: bool) -> None:
    config = ModelConfig(
        vocab_size=vocab_size, num_layers=4, num_heads=4, num_kv_heads=2, width=64, ffn_width=512, max_seq_len=64
    )
    model = Transformer(config, has_recompute=has_recompute)
    tokens = torch.zeros(8, 64, dtype=torch.int64)
    predicted = cost.activation_nbytes(decoder(config), 8, 64, is_half=is_half, has_recompute=has_recompute)
    assert peak_nbytes(model, tokens, None, is_half=is_half) == pytest.approx(predicted, rel=0.06)


@pytest.mark.parametrize("is_half", [False, True])
def test_rows_take_a_mask_more(is_half: bool) -> None:
    config = ModelConfig(
        vocab_size=257, num_layers=2, num_heads=2, num_kv_heads=2, width=32, ffn_width=64, max_seq_len=512
    )
    tokens, positions = torch.zeros(2, 512, dtype=torch.int64), torch.arange(512).repeat(2, 1) % 50
    predicted = cost.activation_nbytes(decoder(config), 2, 512, is_half=is_half, has_rows=True)
    text = cost.activation_nbytes(decoder(config), 2, 512, is_half=is_half)
    assert predicted > 1.3 * text
    assert peak_nbytes(Transformer(config), tokens, positions, is_half=is_half) == pytest.approx(predicted, rel=0.15)


@pytest.mark.parametrize("has_recompute", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"has_qk_norm": True}, marks=pytest.mark.slow),
        pytest.param({"num_heads": 8, "num_kv_heads": 4}, marks=pytest.mark.slow),
        {"width": 256, "ffn_width": 704},
        pytest.param({"vocab_size": 999}, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_no_more_is_alive_in_exact_numbers_than_is_told(changes: dict[str, Any], has_recompute: bool) -> None:
    fields = {"vocab_size": 257, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "width": 128, "ffn_width": 384}
    config = ModelConfig(max_seq_len=512, **(fields | changes))
    model, tokens = Transformer(config, has_recompute=has_recompute), torch.zeros(2, 256, dtype=torch.int64)
    told = cost.exact_activation_nbytes(decoder(config), 2, 256, has_recompute=has_recompute)
    found = peak_nbytes(model, tokens, None, is_half=False, of=exact_loss)
    assert 0.65 * told < found < 1.02 * told


def peak_nbytes(
    model: Transformer,
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    is_half: bool,
    of: Callable[..., torch.Tensor] = SectionModule.loss,
) -> int:
    """Return the bytes of tensors that a step makes and that are alive at once."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            loss = of(model, tokens, tokens, positions)
        loss.backward()  # type: ignore[no-untyped-call]

    step()  # gradients exist from here on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    alive = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def test_memory_by_hand() -> None:
    num, owned = 100 * ALIGNMENT, 25 * ALIGNMENT
    diloco = cost.peer_memory(num, owned, 4, INT8, INT8, sends_delta=True, num_momenta=1, activations=10**9)
    vector = 4 * num
    # local, gradient, two moments, outer, momentum, the merged delta; and the results kept
    assert diloco.always_nbytes == 7 * vector + cost.KEPT_NBYTES
    encoded, merge = num + num // 64, 16 * owned + 3 * (owned + owned // 64)
    assert merge > vector
    assert diloco.peak_nbytes == diloco.always_nbytes + 10**9 + encoded + merge
    ddp = cost.peer_memory(num, owned, 4, FP32, FP32, sends_delta=False, activations=0, num_rounds=2)
    assert ddp.always_nbytes == 5 * vector + 2 * vector
    assert ddp.peak_nbytes == ddp.always_nbytes + vector + (16 + 3 * 4) * owned


def test_large_results_are_kept_for_two_rounds() -> None:
    assert cost.KEPT_NBYTES == RESULTS_NBYTES
    num = 10**9
    memory = cost.peer_memory(
        num, num // 4, 4, INT8, FP32, sends_delta=True, num_momenta=1, activations=0, num_rounds=100
    )
    assert memory.kept == 2 * 4 * num


def test_cost_needs_neither_torch_nor_numpy() -> None:
    program = "import sys, weft.cost.training; sys.exit(bool({'torch', 'numpy', 'msgspec'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
