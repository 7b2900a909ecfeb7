"""What a round takes of a processor beside its inner steps: terms that were measured, added up.

    each round    its turns, threads that wait for each other, promises on disk; and the messages of each other member
    each value    a payload is encoded, a part merged, the results decoded and kept, the outer step made
    each byte     digests, encryption, sockets
    each second   heartbeats, and timers that look after a peer

All are of an elector, which has more of it than a leaf: what it decodes and hands on for its group is in it.

Sources: benchmarks/reports/processor.md, and of messages and bytes rounds.md and averaging.md beside it. One machine
measured them; another one is faster or slower by as much as its inner steps are.
"""

from dataclasses import dataclass

from weft.codec.config import CodecConfig
from weft.plan.groups import largest_group
from weft.plan.question import Question
from weft.plan.timing import Load
from weft.sync.method.choices import AdamWConfig, Choices, InnerConfig, NesterovConfig
from weft.sync.round.groups import NUM_HANDED

ROUND_CPU_S = 17e-3  # processor.md: of four processes with hardly a parameter, without what MESSAGES_CPU_S has
MESSAGES_CPU_S = 3.5e-3  # rounds.md: 11.6 ms a member with 4 of them, 52.3 with 16; per other member
# averaging.md: 3.07 CPU-seconds per GB that a member sends, merging and decoding of fp32 0.8 of them.
BYTES_CPU_S = 2.3e-9
JOURNAL_CPU_S = 0.4e-9  # processor.md: of results, per byte
UPKEEP_CPU_S = 6e-3  # processor.md: per second


@dataclass(frozen=True)
class _PerValue:
    """CPU-nanoseconds per value, of processor.md."""

    encode: float
    merge: float  # decode and add one contribution to a part; of the mean, and its encoding, a share
    decode: float


# The first three as an earlier report has them, on a busier machine; the others by their ratio to int8 in this one.
_CODECS = {
    "fp32": _PerValue(0.4, 3.6, 0.7),
    "bf16": _PerValue(1.7, 2.8, 0.9),
    "int8": _PerValue(1.7, 3.4, 1.3),
    "fp8": _PerValue(11.2, 7.1, 2.6),
    "int4": _PerValue(1.9, 4.1, 1.9),
    "e3m0": _PerValue(3.1, 4.4, 1.9),
    "int2": _PerValue(4.4, 4.9, 1.9),
    "sign": _PerValue(4.4, 4.9, 1.3),
    "top_k": _PerValue(10.8, 16.6, 9.3),
    "random_k": _PerValue(1.0, 3.3, 0.9),
    "nonzero": _PerValue(9.1, 6.0, 3.9),
}
_ADAMW_NS, _NESTEROV_NS, _SGD_NS = 7.2, 2.1, 1.05  # an outer step, with the norm that AdamW clips by
_DELTA_NS, _GRADIENT_NS = 1.13, 0.45  # the difference is taken, the local parameters are set; a gradient is copied


@dataclass(frozen=True, kw_only=True)
class ProcessorTime:
    """CPU-seconds of one elector's round beside its inner steps; `upkeep` for each second of it."""

    round_s: float
    values_s: float
    bytes_s: float
    upkeep: float = UPKEEP_CPU_S

    @property
    def total_s(self) -> float:
        return self.round_s + self.values_s + self.bytes_s


def processor_time(question: Question, load: Load) -> ProcessorTime:
    """Return what a round of `question` takes of an elector's processor; `load` is that of the electorate."""
    others = question.num_electors - 1
    size = largest_group(question.num_electors, question.num_peers - question.num_electors)
    choices = question.choices
    return ProcessorTime(
        round_s=ROUND_CPU_S + MESSAGES_CPU_S * others,
        values_s=1e-9 * _per_value(choices, size) * question.num_parameters + JOURNAL_CPU_S * load.result_nbytes,
        bytes_s=BYTES_CPU_S * sent_nbytes(load, others, size),
    )


def sent_nbytes(load: Load, others: int, size: int) -> float:
    """Return the bytes that an elector with a group of `size` sends and, of leaves' payloads, receives."""
    between = others * (load.payload_nbytes + load.result_nbytes) / (others + 1)
    return between + size * load.payload_nbytes + min(NUM_HANDED, size) * load.result_nbytes


def codec_s(config: CodecConfig, num: int) -> tuple[float, float]:
    """Return the CPU-seconds in which `num` values are encoded, and decoded."""
    own = _of_codec(config)
    return 1e-9 * own.encode * num, 1e-9 * own.decode * num


def merge_s(config: CodecConfig, num: int) -> float:
    """Return the CPU-seconds in which `num` values of others are decoded and added."""
    return 1e-9 * _of_codec(config).merge * num


def _per_value(choices: Choices, size: int) -> float:
    own, reply = _of_codec(choices.codec), _of_codec(choices.reply)
    match choices.apply:
        case InnerConfig() | AdamWConfig():
            step = _ADAMW_NS
        case NesterovConfig():
            step = _NESTEROV_NS
        case _:
            step = _SGD_NS
    brought = _GRADIENT_NS if choices.sends_gradient else _DELTA_NS
    # Of n contributions an n-th each is merged here; of a group, all of each.
    merged = own.merge * (1 + size) + (own.encode if size else 0.0)
    return brought + own.encode + merged + reply.decode + step


def _of_codec(config: CodecConfig) -> _PerValue:
    """Return what a codec takes; of sparse ones, the figures for 64 of 4096 values, whatever is kept; of
    `nonzero`, for one of 20."""
    return _CODECS[str(type(config).__struct_config__.tag)]
