"""Closed forms: the bytes, seconds and memory that a round costs a peer, before anyone joins.

All are functions of plain numbers, and each says what it was checked against. What is measured differs from them by
what they leave out: transport framing (22 bytes per 16 KiB of TLS, 40 bytes per TCP packet), retries, allocator slack.

Bytes are integers; a GB is 10^9 bytes; bps are bits per second.
"""

from dataclasses import dataclass
from typing import Protocol

# --- bytes ---


def vector_nbytes(num: int) -> int:
    """Return the size of `num` values as they are computed with: fp32."""
    return 4 * num


class Encoding(Protocol):
    """How many bytes are made of a vector: any codec."""

    def nbytes(self, num: int) -> int:
        """Return the size of `num` encoded values."""
        ...


@dataclass(frozen=True)
class Traffic:
    """Bytes that one peer sends and receives."""

    sent_nbytes: int
    received_nbytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent_nbytes + other.sent_nbytes, self.received_nbytes + other.received_nbytes)

    def times(self, count: int) -> "Traffic":
        return Traffic(self.sent_nbytes * count, self.received_nbytes * count)


PART_ALIGNMENT = 4096  # elements: sync/records/parts.py cuts parts at its multiples


def part_size(num: int, num_peers: int, index: int = 0) -> int:
    """Return the elements of part `index` when `num` elements are cut into equal parts at aligned borders."""
    num_blocks = -(-num // PART_ALIGNMENT)
    start, stop = (min(num_blocks * i // num_peers * PART_ALIGNMENT, num) for i in (index, index + 1))
    return stop - start


def contribute_traffic(num: int, num_owned: int, num_peers: int, payload: Encoding) -> Traffic:
    """Return the first half of a reduce: all parts but its own go to their owners, its own part comes from the others.

    With equal parts, payloads of b bytes and results of r bytes, both halves are (n - 1) / n (b + r) each way: as much
    as a ring all-reduce, in two steps instead of 2 (n - 1). Exact for parts cut at multiples of the codec's block.

    Args:
        num: elements of the vector.
        num_owned: elements of the part this peer owns: `part_size`, or 0 for a peer reached by relay.
        num_peers: contributors, this one included.
        payload: of the contributions.
    """
    own = payload.nbytes(num_owned)
    return Traffic(payload.nbytes(num) - own, (num_peers - 1) * own)


def result_traffic(num: int, num_owned: int, num_peers: int, reply: Encoding) -> Traffic:
    """Return the second half of a reduce: the owner sends its merged part to all, and gets the other parts."""
    own = reply.nbytes(num_owned)
    return Traffic((num_peers - 1) * own, reply.nbytes(num) - own)


def exchange_traffic(num: int, num_peers: int, payload: Encoding) -> Traffic:
    """Return what one peer sends and receives where each member takes every other one's whole payload.

    With payloads of b bytes: (n - 1) b each way, which is less than a reduce where (n - 1) b < r.
    """
    nbytes = (num_peers - 1) * payload.nbytes(num)
    return Traffic(nbytes, nbytes)


def ring_ddp_traffic(num: int, num_peers: int, num_steps: int = 1, value_nbytes: int = 2) -> Traffic:
    """Return what data-parallel training sends in `num_steps` steps: a ring all-reduce of bf16 gradients each.

    2 (n - 1) / n of the vector each way (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """
    nbytes = num_steps * 2 * (num_peers - 1) * num * value_nbytes // num_peers
    return Traffic(nbytes, nbytes)


_NAME_NBYTES = 66  # a digest or a peer id in a record: 64 hexadecimal characters and their length
_MESSAGE_NBYTES = 350  # a round message without its lists: its fields, the signed envelope, note and frame; a vote
_CONTRIBUTION_NBYTES = 91  # one contributor without its parts: peer, tokens, field names
_COUNTED_NBYTES = 159  # the same in a manifest, with one digest for all parts
_MANIFEST_NBYTES = 410  # one manifest without its lists
_MEMBER_NBYTES = 314  # of a manifest, per member: name, uplink, its part's owner, size and result, lease
_GATHERED_NBYTES = 190  # what an owner tells that it holds, without the names of whose
REQUEST_NBYTES = 119  # asking for a blob, and the header of the answer
HEARTBEAT_NBYTES = 280  # with a member's summary
HEARTBEAT_S = 2.0  # from one to the next


@dataclass(frozen=True)
class Letters:
    """Bytes of each message of a round, as often as it is sent once."""

    ready: int
    gathered: int
    merged: int
    collect: int
    proposed: int
    decided: int
    holding: int
    accept: int

    @property
    def with_leader(self) -> int:
        """Return what the leader and one member say to each other."""
        return self.gathered + self.collect + self.proposed + self.decided + self.holding + self.accept


def round_letters(num_peers: int) -> Letters:
    """Return the bytes of a round's messages among `num_peers` members with a part each."""
    n = num_peers
    lists = n * (_CONTRIBUTION_NBYTES + n * _NAME_NBYTES)
    manifest, majority = _MANIFEST_NBYTES + n * (_COUNTED_NBYTES + _MEMBER_NBYTES), n // 2 + 1
    return Letters(
        ready=_MESSAGE_NBYTES + n * _NAME_NBYTES,
        gathered=_GATHERED_NBYTES + n * _NAME_NBYTES,
        merged=_MESSAGE_NBYTES + _NAME_NBYTES,
        collect=_MESSAGE_NBYTES + lists + n * _NAME_NBYTES,
        proposed=_MESSAGE_NBYTES + manifest,
        decided=manifest + majority * _MESSAGE_NBYTES,
        holding=_MESSAGE_NBYTES + n * _NAME_NBYTES,
        accept=_MESSAGE_NBYTES + _NAME_NBYTES,
    )


def control_traffic(num_peers: int, round_s: float = 0.0) -> Traffic:
    """Return the bytes of one round's messages and of the heartbeats meanwhile, for the mean member (leaders rotate).

    Counts, for n members with n parts, one attempt and no loss: Ready and Merged to all, Collect, Propose and the
    decision with a majority's votes from the leader to all, Gathered, Holding and Accept to the leader, a request for
    each blob. Whose vote comes after the majority's is told the decision again. The lists of n^2 part digests dominate
    from 8 members on. Within 5 % of the messages' canonical bytes, and of what 4 to 16 members were measured to send
    (benchmarks/reports/bytes.md; two: 7 %); retries come on top.
    """
    others, n, letters = num_peers - 1, num_peers, round_letters(num_peers)
    majority = n // 2 + 1
    requests = 2 * REQUEST_NBYTES  # per other member: a part of its payload, and its merged part
    heartbeats = int(round_s / HEARTBEAT_S * HEARTBEAT_NBYTES)
    with_leader = others * letters.with_leader + (n - majority) * letters.decided
    nbytes = others * (letters.ready + letters.merged + requests + heartbeats) + with_leader // n
    return Traffic(nbytes, nbytes)


# --- seconds ---


@dataclass(frozen=True)
class Link:
    up_bps: float
    down_bps: float

    def seconds(self, traffic: Traffic) -> float:
        """Return how long `traffic` takes when both directions run at once, without latency."""
        return max(8 * traffic.sent_nbytes / self.up_bps, 8 * traffic.received_nbytes / self.down_bps)


def work_s(num_steps: int, tokens_per_step: int, flops_per_token: float, flops_per_s: float) -> float:
    """Return the seconds of `num_steps` inner steps at a measured speed in floating-point operations per second."""
    return num_steps * tokens_per_step * flops_per_token / flops_per_s


def gigabytes_per_day(nbytes_per_round: int, round_s: float) -> float:
    """Return the GB a peer moves in a day of rounds of `round_s` seconds, work and exchange together."""
    return nbytes_per_round * 86_400 / round_s / 1e9


# --- the model ---


@dataclass(frozen=True)
class Decoder:
    """What the closed forms need to know of a model (weft.model.config says what the words mean)."""

    num_parameters: int
    vocab_size: int
    num_layers: int
    num_heads: int
    width: int
    q_width: int
    kv_width: int
    ffn_width: int
    has_qk_norm: bool = False

    @property
    def layer_matrices(self) -> int:
        """Elements of one layer's matrices."""
        attention = self.width * (self.q_width + 2 * self.kv_width) + self.q_width * self.width
        return attention + 3 * self.width * self.ffn_width


def flops_per_token(decoder: Decoder, seq_len: int) -> float:
    """Return the floating-point operations of training on one token: forward, and backward for twice as many.

    6 per element of every matrix a token is multiplied by (the head is one, the embedding is not), and
    12 layers x q_width x seq_len for attention scores and values. PaLM, 2204.02311, appendix B; causal masks
    are not halved.
    """
    matrices = decoder.num_layers * decoder.layer_matrices + decoder.vocab_size * decoder.width
    return 6 * matrices + 12 * decoder.num_layers * decoder.q_width * seq_len


# --- memory ---


def layer_nbytes(decoder: Decoder, *, is_half: bool = False) -> int:
    """Return the bytes that one layer keeps of a token from its forward to its backward pass; see below."""
    c, q, k, f = decoder.width, decoder.q_width, decoder.kv_width, decoder.ffn_width
    layer = 12 * c + 6 * (q + k) + 8 * f if is_half else 16 * c + 8 * (q + k) + 16 * f
    layer += 4 * (2 + decoder.num_heads)
    return layer + decoder.has_qk_norm * 4 * (q + k)  # normed heads, before their gain


def mask_nbytes(num_samples: int, seq_len: int, *, is_half: bool = False) -> int:
    """Return the bytes of what says who sees whom in rows of whole texts.

    Of each pair of tokens a number for all layers, and two bytes more while it is made.
    """
    return num_samples * seq_len**2 * ((2 if is_half else 4) + 2)


def activation_nbytes(
    decoder: Decoder,
    micro_batch: int,
    seq_len: int,
    *,
    is_half: bool = False,
    has_recompute: bool = False,
    has_rows: bool = False,
    num_thinned: int = 0,
) -> int:
    """Return the bytes of tensors alive at the peak of one micro-batch, early in its backward pass.

    Counted from what autograd keeps of each operation of model/layers.py, per token and layer, with C width, Q and K of
    queries and keys, F inside SwiGLU, H heads:
        two norms        normed input and output: 2 C each, and one number (a fused kernel: input and output)
        attention        projected V, that is K, rotated Q + K, output Q, and H numbers; in half precision, where the
                         projection is one matmul, Q + K more
        SwiGLU           gate and up 2 F, silu F, product F
    in fp32; with `is_half` (autocast) matmul inputs and outputs are 2 bytes, normed inputs stay fp32, and a bf16 copy
    of the matrices lives from forward to backward. The loss holds log-probabilities, their gradient and the logits'
    gradient, 3 x vocabulary x 4 bytes a token; with a small vocabulary the last SwiGLU's backward pass holds more, 7 F
    bytes beyond what it frees (half: 4 F; measured). With `has_recompute`, each layer keeps its input only, and one
    layer's activations exist at a time. The allocator of a CPU process holds more than its tensors: `HEAP`. With
    `has_rows`, `mask_nbytes` more. Of `num_thinned` numbers that adapters with dropout read, a copy is kept, and of
    each whether it was left out.
    """
    c, f = decoder.width, decoder.ffn_width
    layer, final = layer_nbytes(decoder, is_half=is_half), (6 if is_half else 8) * c
    layer += num_thinned * (3 if is_half else 5)
    working = (4 if is_half else 7) * f
    if has_recompute:  # the loss's peak comes before any layer is computed again
        layers, last, num_copied = decoder.num_layers * 4 * c, max(12 * decoder.vocab_size, layer + working), 1
    else:
        layers, last, num_copied = decoder.num_layers * layer, max(12 * decoder.vocab_size, working), decoder.num_layers
    copies = 2 * (num_copied * decoder.layer_matrices + decoder.vocab_size * c) if is_half else 0
    mask = mask_nbytes(micro_batch, seq_len, is_half=is_half) if has_rows else 0
    return micro_batch * seq_len * (layers + final + last + 16) + copies + mask


# Of exact numbers: tokens whose queries are computed at a time, and what pieces of products are put into.
EXACT_TOKENS, _EXACT_ROOM_NBYTES = 64, 24 << 18


# A training step in exact numbers takes so many times one in fp32 on the same CPU: 3.04 at 0.4 million parameters, 2.82
# at 3 million (benchmarks/reports/exact.md).
EXACT_TIMES = 3.0


def exact_activation_nbytes(
    decoder: Decoder, micro_batch: int, seq_len: int, *, has_recompute: bool = False, has_rows: bool = False
) -> int:
    """Return the bytes of tensors alive at the peak of one micro-batch in exact numbers, or some more.

    Counted from what training/numerics keeps. Of a token and layer, in fp32: normed input and output of two norms 4 C;
    queries, what they mix and its copy 3 Q; keys and values 2 K; SwiGLU 4 F; and the weights of attention, half a row
    for each head. A matrix and its gradient are 8 bytes a number meanwhile, and 4 more.
    """
    c, q, k, f = decoder.width, decoder.q_width, decoder.kv_width, decoder.ffn_width
    layer = 4 * (4 * c + 3 * q + 2 * k + 4 * f + decoder.has_qk_norm * (q + k))
    layer += 2 * decoder.num_heads * (seq_len + EXACT_TOKENS)
    layers = decoder.num_layers * 4 * c + layer if has_recompute else decoder.num_layers * layer
    matrix = 20 * max(decoder.vocab_size, 2 * f) * c
    mask = mask_nbytes(micro_batch, seq_len) if has_rows else 0
    return micro_batch * seq_len * (layers + 8 * c + 12 * decoder.vocab_size + 16) + matrix + _EXACT_ROOM_NBYTES + mask


SPARE = 0.9  # of what is free may be planned for; the rest is the allocator's slack and other programs' growth
# Of activations, what the allocator of a CPU process holds beside: tensors of a micro-batch come and go between those
# that stay (glibc, 4.5 to 135 million parameters, 230 MB to 1.8 GB of activations: 0.59 to 0.81). Blocks that go back
# to the system as soon as they are freed would be 0.2, and steps half as fast again.
HEAP = 0.65
KEPT_NBYTES = 512 << 20  # of results, which peer/chain.py keeps for stragglers; more where two rounds have more


@dataclass(frozen=True)
class Memory:
    """Bytes a training peer holds, by component."""

    local: int  # the parameters it trains
    gradient: int
    inner_optimizer: int  # its moments
    outer: int  # parameters of the last commit
    outer_optimizer: int  # momentum
    merged: int  # what the last round came to, decoded
    kept: int  # results of the last rounds, encoded
    activations: int
    payload: int  # what this peer contributes, until the next round's
    delta: int  # only while it is encoded
    merge: int  # as the owner of a part: accumulator, decoded and encoded parts
    errors: int = 0  # what codecs have left, and what the payload under way would leave
    copies: int = 0  # what is known of neighbours, and where to go from there
    heap: int = 0  # what a CPU's allocator holds beside activations that come and go

    @property
    def always_nbytes(self) -> int:
        vectors = self.local + self.gradient + self.inner_optimizer + self.outer + self.outer_optimizer
        return vectors + self.merged + self.kept + self.errors + self.copies

    @property
    def exchange_nbytes(self) -> int:
        """Return the most that a round takes beside what is always there."""
        return self.payload + max(self.delta, self.merge)

    @property
    def peak_nbytes(self) -> int:
        """Return the most a peer holds that computes on its CPU.

        Training and exchanging do not peak together, but the allocator keeps the one's memory when the other begins
        (measured, benchmarks/reports/memory.md).
        """
        return self.always_nbytes + self.activations + self.exchange_nbytes

    @property
    def on_cpu(self) -> int:
        """Return the bytes that a process takes which computes on its CPU."""
        return self.peak_nbytes + self.heap

    @property
    def on_gpu(self) -> tuple[int, int]:
        """Return which bytes lie on the GPU of a peer that computes there, and which on its host."""
        moments = self.inner_optimizer if self.outer else 0  # where gradients are sent they are replicated: on the host
        # Evaluation puts a second vector beside the model, at a time without a backward pass.
        on_device = self.local + self.gradient + moments + max(self.activations, self.local)
        return on_device, self.peak_nbytes - self.activations - self.gradient - moments


def peer_memory(
    num: int,
    num_owned: int,
    num_peers: int,
    payload: Encoding,
    reply: Encoding,
    *,
    sends_delta: bool,
    activations: int,
    num_sent: int | None = None,
    num_moments: int = 2,
    num_momenta: int = 0,
    num_errors: int = 0,
    num_copies: int = 0,
    is_in_basis: bool = False,
    rule_nbytes: int = 0,
    has_reply_errors: bool = False,
    num_rounds: int | None = None,
) -> Memory:
    """Return the memory of a peer by component.

    Args:
        num: parameters; num_owned: elements of its part of what is sent; num_peers: contributors.
        payload, reply: what contributions and results are encoded as.
        sends_delta: it keeps the outer parameters beside those it trains, and subtracts; otherwise its gradient is
            copied, and the outer parameters are those it trains.
        activations: `activation_nbytes`.
        num_sent: numbers that are encoded of so many parameters; None: as many.
        num_moments, num_momenta: vectors of the inner and of the outer optimizer.
        num_errors: vectors of what codecs leave: two with feedback, one more with feedback of replies.
        num_copies: vectors of who exchanges with neighbours, beside its own.
        is_in_basis: vectors are copied into another order or basis before they are encoded.
        rule_nbytes: bytes of an element that the rule of merging holds beside a sum.
        has_reply_errors: an owner keeps what the codec of results leaves.
        num_rounds: that it lives for; None: until no more results are kept.
    """
    vector, num_sent = vector_nbytes(num), num if num_sent is None else num_sent
    encoded, result, moved = payload.nbytes(num_sent), reply.nbytes(num_sent), vector_nbytes(num) * is_in_basis
    is_view = encoded == vector  # fp32 bytes are a view of the vector
    kept = max(KEPT_NBYTES, 2 * result)
    return Memory(
        local=vector,
        gradient=vector,
        inner_optimizer=num_moments * vector,
        outer=vector if sends_delta else 0,
        outer_optimizer=num_momenta * vector,
        merged=vector,
        kept=kept if num_rounds is None else min(kept, num_rounds * result),
        activations=activations,
        payload=encoded if sends_delta or is_view else vector + encoded,
        delta=(vector if sends_delta and not is_view else 0) + moved,
        # float64 sum, one decoded contribution, the mean, what came from the others; the result is among those kept.
        # What the rule holds; the mean with what was left before, and what is left now.
        merge=(8 + 4 + 4 + rule_nbytes + 8 * has_reply_errors) * num_owned
        + (num_peers - 1) * payload.nbytes(num_owned)
        + moved,
        errors=num_errors * vector,
        copies=num_copies * vector,
        heap=int(HEAP * activations),
    )
