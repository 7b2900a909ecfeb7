"""What joining a run costs this machine: shown to a person who is asked whether to.

Bytes of data, disk, memory and of a round follow from the run in closed form (`weft.cost`). How often a round comes
around does not: it is bounded from below by what the inner steps would take if this machine did nothing but multiply
matrices of the model's shape, which is measured in a moment.

It does not know how fast the other members or the links are; slower ones make rounds longer, and the bytes per day
fewer.
"""

from dataclasses import dataclass

import torch

from weft import cost
from weft.clock import Clock
from weft.ids import PeerId
from weft.model.config import ModelConfig, num_parameters
from weft.net.messages import Contact
from weft.net.ticket import Ticket
from weft.peer.config import PeerConfig, RunConfig
from weft.peer.device import Device, choose, decoder, encoding, needed_nbytes
from weft.peer.home import Home
from weft.sync.method import Method

CHECKPOINT_VECTORS = 10  # outer, momentum, local and two moments, twice while a new one is written
LEAST_ROUND_S = 0.01  # of two peers on one machine with next to nothing to train: messages, and promises on the disk
LEAST_MEASURED_S = 0.02  # less says little beside the clock's grain; at most five times as long is spent
MAX_ROWS, MAX_WIDTH = 256, 2048  # of what is multiplied: 2 GFLOP and 48 MiB at most


@dataclass(frozen=True, kw_only=True)
class Terms:
    run: RunConfig
    issuer: PeerId
    contacts: tuple[Contact, ...]
    num_parameters: int
    fetch_nbytes: int  # data, first weights and state, as far as they are not here
    disk_nbytes: int  # data and checkpoint
    memory_nbytes: int
    num_peers: int  # as far as the ticket tells, this one included
    round_nbytes: int  # sent and received in one round of so many
    flops_per_s: float  # of matrix products here
    round_s: float  # at that speed: the shortest that a round may take

    @property
    def gigabytes_per_day(self) -> float:
        """Return the most this machine may move in a day."""
        return cost.gigabytes_per_day(self.round_nbytes, self.round_s)


def terms(run: RunConfig, ticket: Ticket, home: Home, settings: PeerConfig, clock: Clock) -> Terms:
    """Return what joining `run` costs; takes about a tenth of a second.

    Raises:
        ConfigError: the settings name a device that is not there.
    """
    num, choices, device = num_parameters(run.model), run.method, choose(settings)
    codec, reply = encoding(choices.codec), encoding(choices.reply_codec or choices.codec)
    num_peers = max(2, len(ticket.contacts) + 1)
    traffic = cost.reduce_traffic(num, cost.part_size(num, num_peers), num_peers, codec, reply)
    if settings.threads:
        torch.set_num_threads(settings.threads)  # as training does
    flops_per_s = product_flops(run.model, run.tokens_per_step, device, clock)
    flops_per_token = cost.flops_per_token(decoder(run.model), run.train.seq_len)
    num_vectors = 1 + len(Method(choices, run.train.optimizer).init(0))  # of the state: parameters, outer optimizer
    if not run.is_seeded and home.blobs.open(run.initial) is None:
        num_vectors += 1
    fetch_nbytes = sum(info.nbytes for info in home.shards.missing(run.data)) + num_vectors * cost.FP32.nbytes(num)
    return Terms(
        run=run,
        issuer=ticket.issuer,
        contacts=ticket.contacts,
        num_parameters=num,
        fetch_nbytes=fetch_nbytes,
        disk_nbytes=fetch_nbytes + 4 * num * CHECKPOINT_VECTORS,
        memory_nbytes=sum(needed_nbytes(run, settings, device, 1).values()),
        num_peers=num_peers,
        round_nbytes=traffic.sent_nbytes + traffic.received_nbytes,
        flops_per_s=flops_per_s,
        round_s=max(LEAST_ROUND_S, cost.work_s(choices.every, run.tokens_per_step, flops_per_token, flops_per_s)),
    )


def product_flops(model: ModelConfig, num_rows: int, device: Device, clock: Clock) -> float:
    """Return the floating-point operations per second of multiplying matrices of the model's shape, large ones cut."""
    rows, width, ffn_width = min(num_rows, MAX_ROWS), min(model.width, MAX_WIDTH), min(model.ffn_width, MAX_WIDTH)
    dtype = device.autocast_dtype or torch.float32
    left = torch.ones((rows, width), dtype=dtype, device=device.torch)
    right = torch.ones((width, ffn_width), dtype=dtype, device=device.torch)
    float((left @ right)[0, 0])  # the first one allocates, and wakes threads
    num_products = 1
    while True:
        began = clock.now()
        for _ in range(num_products):
            product = left @ right
        float(product[0, 0])  # waits for a GPU
        took_s = clock.now() - began
        if took_s >= LEAST_MEASURED_S:
            return 2.0 * rows * width * ffn_width * num_products / took_s
        num_products *= 4
