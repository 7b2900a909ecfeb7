"""The square-cube law: how busy a machine is that holds some layers of a width, over a line.

Of a layer of width C, with as wide an inside in proportion, a token takes 72 C^2 operations to train on, and its
activations are C numbers each way: the wider a layer, the longer a machine works on what a line carries.

    u_alone   = c / (c + b + r)              one micro-batch at a time, as the paper measures
    u_passing = min(1, c / b, W c / (c + b + r))     W under way at a time, of which all but one wait for nothing

with c the seconds that a micro-batch computes, b those that its bytes, both ways, take, and r round trips.

Ryabinin et al., SWARM, 2301.11913, section 3.1.
"""

from dataclasses import dataclass

FLOPS_PER_SQUARE = 72.0  # a token and layer: 6 for each of 12 C^2 elements (4 C^2 attention, 8 C^2 inside)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is alike for all widths.

    Args:
        flops_per_s: that a machine makes of them. bps: of its line, each way.
        value_nbytes: of an encoded number, with its share of a scale.
        num_tokens: of a micro-batch. num_layers: that the machine holds. seq_len: what attention goes over.
        num_trips: round trips that a micro-batch waits for, forward and back together.
        num_under_way: micro-batches at a time.
    """

    flops_per_s: float
    bps: float
    value_nbytes: float
    num_tokens: int
    num_layers: int = 1
    seq_len: int = 512
    num_trips: float = 2.0
    num_under_way: int = 1


def compute_s(width: int, setting: Setting) -> float:
    """Return the seconds that a micro-batch computes: forward and back."""
    a_token = setting.num_layers * (FLOPS_PER_SQUARE * width**2 + 12 * width * setting.seq_len)
    return setting.num_tokens * a_token / setting.flops_per_s


def transfer_s(width: int, setting: Setting) -> float:
    """Return the seconds that a micro-batch's bytes take: activations forward, their gradient back."""
    return 2 * 8 * setting.num_tokens * width * setting.value_nbytes / setting.bps


def utilisation(width: int, rtt_s: float, setting: Setting) -> float:
    """Return the share of its time that a machine computes.

    Args:
        width: of its layers.
        rtt_s: to a neighbour and back.
    """
    compute, transfer = compute_s(width, setting), transfer_s(width, setting)
    trip_s = compute + transfer + setting.num_trips * rtt_s
    if setting.num_under_way == 1:
        return compute / trip_s
    return min(1.0, compute / transfer, setting.num_under_way * compute / trip_s)
