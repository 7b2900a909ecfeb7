"""How many tokens this machine trains on in a given time: a few steps of the model itself, measured.

An estimate: peers that share the cores of one machine also exchange and evaluate.
"""

from pathlib import Path

import torch

from weft.clock import SystemClock
from weft.data import ByteTokenizer
from weft.model import Transformer
from weft.peer.config import RunFile
from weft.peer.seal import resolve

_NUM_STEPS = 3
_SHARE = 0.75  # of the time is inner steps, in the demo on two cores


def tokens_in(run_file: RunFile, seconds: float) -> int:
    """Return about how many tokens all peers of one machine commit in `seconds`, a whole number of rounds."""
    train = run_file.train
    model = Transformer(resolve(run_file, ByteTokenizer(), Path()))
    tokens = torch.zeros((train.batch_size, train.seq_len), dtype=torch.int64)
    model.loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]  # the first one allocates
    clock = SystemClock()
    began = clock.now()
    for _ in range(_NUM_STEPS):
        model.loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]
    per_s = _NUM_STEPS * tokens.numel() / (clock.now() - began)
    per_round = getattr(run_file.method, "every", 1) * run_file.peers * tokens.numel()
    return max(1, round(_SHARE * seconds * per_s / per_round)) * per_round
