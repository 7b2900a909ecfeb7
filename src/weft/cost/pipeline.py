"""Closed forms of a pipeline: what a section of a model computes, sends and holds, before anyone takes one.

    section_flops       of a token: forward, the input's gradient, the weights' gradients
    crossing            bytes that pass between two stages for one micro-batch, each way
    under_way_nbytes    what a member keeps of each micro-batch between its forward pass and its sender's word
    activation_nbytes   of all of them, and what is worked on

As of pipeline/ and model/backward.py: a micro-batch keeps what autograd needs until its gradient has come, then what
its weights' gradients are made of until they count. Logits are kept in the last section alone.

A number on its way counts as fp32 until it is encoded.
"""

from dataclasses import dataclass

from weft.cost.training import Decoder, layer_nbytes, mask_nbytes

TOKEN_NBYTES = 4  # as messages carry them

# Messages about one micro-batch, beside tokens and blobs, as frames: a call, its answer and a note have their own
# fields around them. Down: Forward, Verdict, the header of the activations, a request for the gradient. Up: IsTaken,
# Computed, Backward, a request for the activations, the header of the gradient.
DOWN_LETTERS_NBYTES = 500
UP_LETTERS_NBYTES = 610

# What a peer's process takes before it holds anything of a run: Python, torch and weft, without the files that it maps
# and the system may take back (`weft.run.host.process_nbytes`). Measured: 165 MB on Linux with a CPU's torch; one with
# CUDA's takes more of the host once it has a context.
BASE_NBYTES = 165_000_000

# Of micro-batches that are computed again on their way back, so many that have gone back keep what their weights'
# gradients are made of until they count. Of others it is computed once more.
NUM_OWED = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the closed forms need to know of a section (weft.model.sections says what the words mean).

    Args:
        decoder: the whole model.
        num_parameters: of the section; a tied matrix counts in each that has it.
    """

    decoder: Decoder
    num_parameters: int
    num_layers: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    num_samples: int
    seq_len: int  # tokens of a sample that are predicted
    activations_nbytes: int = 0  # encoded, between two sections
    gradients_nbytes: int = 0  # of activations
    has_rows: bool = False  # of whole texts

    @property
    def num_tokens(self) -> int:
        return self.num_samples * self.seq_len


# --- operations ---


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Of one token, in floating-point operations."""

    forward: float
    input: float  # the gradient of the section's input, which the stage before waits for
    weights: float  # nobody waits for these

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weights


def section_flops(shape: Shape, seq_len: int) -> Flops:
    """Return what a section computes of a token; of all sections together, `training.flops_per_token`.

    2 per element of each matrix in each of the three, and of attention scores and values, which have no weights,
    4 x q_width x seq_len a layer forward and twice as many back.
    """
    decoder = shape.decoder
    matrices = shape.num_layers * decoder.layer_matrices + shape.is_last * decoder.vocab_size * decoder.width
    attention = 4 * shape.num_layers * decoder.q_width * seq_len
    return Flops(forward=2 * matrices + attention, input=2 * matrices + 2 * attention, weights=2 * matrices)


# --- bytes ---


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What passes between two stages for one micro-batch that is sent once: bytes."""

    down_nbytes: int  # to the later stage: tokens, activations
    up_nbytes: int  # back: their gradient

    @property
    def total_nbytes(self) -> int:
        return self.down_nbytes + self.up_nbytes


def crossing(micro: MicroBatch) -> Crossing:
    """Return the bytes between neighbouring stages. Tokens go with activations: the last stage compares them."""
    return Crossing(
        down_nbytes=DOWN_LETTERS_NBYTES + tokens_nbytes(micro) + micro.activations_nbytes,
        up_nbytes=UP_LETTERS_NBYTES + micro.gradients_nbytes,
    )


def entry(micro: MicroBatch) -> Crossing:
    """Return the bytes between who begins a micro-batch and another member of the first stage."""
    return Crossing(down_nbytes=DOWN_LETTERS_NBYTES + tokens_nbytes(micro), up_nbytes=UP_LETTERS_NBYTES)


def tokens_nbytes(micro: MicroBatch) -> int:
    return TOKEN_NBYTES * micro.num_samples * (micro.seq_len + 1)


# --- memory ---


def kept_nbytes(shape: Shape, micro: MicroBatch, *, is_half: bool = False) -> int:
    """Return the bytes of tensors that a micro-batch keeps, from its forward pass until its weights' gradients.

    Of each token what `training.layer_nbytes` says of each layer; tokens, or the activations that came in; those that
    go out, or the final norm's input and output, log-probabilities, and what to predict. Of each position of a sample
    the sines and cosines, once; in rows of whole texts those of each sample, and the mask. After its gradient has gone
    back a micro-batch keeps the inputs and the outputs' gradients of matrices in their place, which are fewer: without
    SwiGLU's parts, and as many numbers of logits.
    """
    decoder = shape.decoder
    came = 8 if shape.is_first else 4 * decoder.width
    goes = 4 * decoder.width
    if shape.is_last:
        goes = (6 if is_half else 8) * decoder.width + 4 + 4 * decoder.vocab_size + 8
    a_token = shape.num_layers * layer_nbytes(decoder, is_half=is_half) + came + goes
    head_width = decoder.q_width // decoder.num_heads
    turns, mask = 2 * 4 * head_width * micro.seq_len, 0
    if micro.has_rows:
        turns, mask = turns * micro.num_samples, mask_nbytes(micro.num_samples, micro.seq_len, is_half=is_half)
    return micro.num_tokens * a_token + turns + mask + 8 * shape.is_last


def input_nbytes(shape: Shape, micro: MicroBatch) -> int:
    """Return the bytes of tensors that a micro-batch keeps which is computed again on its way back.

    Of each token: tokens, or the activations that came in; the output and its gradient, or what to predict.
    """
    width = shape.decoder.width
    came, goes = (8 if shape.is_first else 4 * width), (8 if shape.is_last else 2 * 4 * width)
    return micro.num_tokens * (came + goes)


def under_way_nbytes(shape: Shape, micro: MicroBatch, *, is_half: bool = False, has_recompute: bool = False) -> int:
    """Return the bytes that a member holds of each micro-batch that it has taken and not heard the end of.

    Beside what is kept, encoded: what came, what went, and the gradients of both.
    """
    num_crossings = (not shape.is_first) + (not shape.is_last)
    encoded = tokens_nbytes(micro) + num_crossings * (micro.activations_nbytes + micro.gradients_nbytes)
    return (input_nbytes(shape, micro) if has_recompute else kept_nbytes(shape, micro, is_half=is_half)) + encoded


def working_nbytes(shape: Shape, micro: MicroBatch, *, is_half: bool = False) -> int:
    """Return the bytes beside all that while one backward pass is made.

    Two vectors of activations, decoded or before they are encoded, and the most that a step of the pass makes: logits'
    gradients twice in the last section, SwiGLU's elsewhere, as `training.activation_nbytes` counts them; then the
    gradient of the largest matrix, before it is added. In half precision copies of the section's matrices too.
    """
    decoder = shape.decoder
    largest = decoder.width * max(2 * decoder.ffn_width, decoder.q_width + 2 * decoder.kv_width)
    if shape.is_first or shape.is_last:
        largest = max(largest, decoder.vocab_size * decoder.width)
    most = (4 if is_half else 7) * decoder.ffn_width
    copies = 0
    if shape.is_last:
        most = max(most, 8 * decoder.vocab_size)
    if is_half:
        head = shape.is_last * decoder.vocab_size * decoder.width
        copies = 2 * (shape.num_layers * decoder.layer_matrices + head)
    return micro.num_tokens * (2 * 4 * decoder.width + most) + 4 * largest + copies


def activation_nbytes(
    shape: Shape, micro: MicroBatch, num_taken: int, *, is_half: bool = False, has_recompute: bool = False
) -> int:
    """Return what a member of a stage holds of micro-batches at its peak.

    Args:
        num_taken: between their forward pass and their sender's word, at most (pipeline.worker.Bounds).
        has_recompute: they are computed again on their way back: only then, and `NUM_OWED` times after it, is kept
            what they keep else from the beginning.
    """
    under_way = num_taken * under_way_nbytes(shape, micro, is_half=is_half, has_recompute=has_recompute)
    if has_recompute:
        under_way += min(num_taken, NUM_OWED + 1) * kept_nbytes(shape, micro, is_half=is_half)
    return under_way + working_nbytes(shape, micro, is_half=is_half)
