"""What the demo's model is held against: an n-gram model fitted on the run's training text.

It is scored on the very tokens that the run's evaluation predicts, each with all the text before it as context.
"""

import os
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from weft.data.assign import num_windows
from weft.data.corpus import Split
from weft.data.ngram import NgramModel
from weft.ids import Digest, RunId
from weft.run.config import RunConfig
from weft.run.genesis import MAX_RUN_NBYTES, on_corpus, read_run
from weft.run.machine import PeerConfig
from weft.store.home import Home

ORDER = 3  # bytes of context


def start(home: Home, run: RunId) -> "Future[float]":
    """Fit and score in a thread of low priority; the result is nats per byte on the held-out text."""
    result: Future[float] = Future()

    def work() -> None:
        if sys.platform == "linux":  # there a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            result.set_result(nats_per_byte(home, load_run(home, run)))
        except BaseException as error:  # whoever asks for the result is told
            result.set_exception(error)

    threading.Thread(target=work, daemon=True, name="n-gram baseline").start()
    return result


def load_run(home: Home, run: RunId) -> RunConfig:
    """Return the RunConfig that this home keeps of `run`.

    Raises:
        KeyError: it keeps none.
    """
    data = home.blobs.read(Digest(run), MAX_RUN_NBYTES)
    if data is None:
        raise KeyError(run)
    return on_corpus(read_run(data, PeerConfig().max_parameters))


def nats_per_byte(home: Home, run: RunConfig) -> float:
    """Return the n-gram model's loss on what the run evaluates on."""
    model = NgramModel.fit(_tokens(home, run, "train"), ORDER, run.data.vocab_size)
    heldout = _tokens(home, run, "heldout")
    there = num_windows(len(heldout), run.train.seq_len)
    count = min(run.train.evaluate_windows, there)
    # As Batches.heldout_batches: windows spread evenly; the target of place p is token p + 1, which has probability p.
    starts = np.arange(count) * there // count * run.train.seq_len
    places = (starts[:, None] + np.arange(run.train.seq_len)).ravel()
    losses = -np.log(model.probabilities(heldout)[places])
    return run.data.nats_per_byte(float(losses.mean()))


def _tokens(home: Home, run: RunConfig, split: Split) -> "NDArray[np.integer]":
    return np.concatenate([home.shards.open(run.data, info) for info in run.data.shards(split)])
