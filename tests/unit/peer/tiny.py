"""A run small enough to train in milliseconds, for tests of the inner loop."""

from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from weft import wire
from weft.codec.config import Fp32Config
from weft.data.batch import Batches
from weft.data.rows import Packer, words
from weft.data.store import TRAINED, DataIndex, Rows, ShardInfo, ShardStore
from weft.model.config import ModelConfig
from weft.run.config import RunConfig, TrainConfig
from weft.run.outline import TicketAdmission
from weft.sync.method.presets import FedAvgConfig, MethodConfig, spell_out
from weft.sync.method.schedule import ConstantConfig

SEQ_LEN = 16
VOCAB = 257  # of the byte tokenizer
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    width=32,
    ffn_width=48,
    max_seq_len=32,
    has_qk_norm=True,
    is_tied=True,
)
FEDAVG = FedAvgConfig(every=4, codec=Fp32Config())


def tokens(num: int = 6000) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return a stream that a model can learn something of: letters that mostly follow each other."""
    generator = np.random.default_rng(7)
    return ((np.arange(num) + 5 * (generator.random(num) < 0.2).cumsum()) % 26 + 97).astype("<u2")


def run_config(method: MethodConfig = FEDAVG, model: ModelConfig = MODEL, **train: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "batch_size": 4,
        "tokens": 1_000_000,
        "schedule": ConstantConfig(lr=1e-2),
    }
    return RunConfig(
        name="tiny",
        seed=3,
        model=model,
        initial=wire.digest(b"any"),
        is_seeded=True,
        data=_index("0" * 64),
        is_private=False,
        train=TrainConfig(**(fields | train)),
        method=spell_out(method, 2),
        admission=TicketAdmission(),
        orphan_after_s=None,
        is_strict=False,
        has_even_leases=True,
    )


def rows_of_texts() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return rows of short texts, of whose tokens the later half is trained on."""
    generator, packer, rows = np.random.default_rng(8), Packer(SEQ_LEN, 0), []
    for _ in range(400):
        ids = (generator.integers(97, 110) + np.arange(generator.integers(2, SEQ_LEN + 1))).astype(np.uint32)
        rows += packer.add(words(ids, np.arange(len(ids)) >= len(ids) / 2))
    return np.concatenate([*rows, *packer.finish()])


def rows_run(run: RunConfig, folder: Path) -> RunConfig:
    """Return a run as `run`, on rows of texts, which are put into `folder`."""
    data = rows_of_texts()
    digest = ShardStore(folder).put(data.astype("<u4").tobytes())
    info = ShardInfo(digest=digest, num_tokens=data.size, nbytes=4 * data.size)
    num_trained = int(np.count_nonzero(data & TRAINED))
    rows = Rows(
        length=SEQ_LEN, train_trained=num_trained, heldout_trained=num_trained, too_long="cut", date="2026-01-01"
    )
    changed = replace(run.data, dtype="uint32", train=(info,), heldout=(info,), rows=rows)
    return replace(run, data=changed)


def rows_batches(run: RunConfig, folder: Path, split: str = "train") -> Batches:
    return Batches(ShardStore(folder), run.data, split, SEQ_LEN, seed=3)  # type: ignore[arg-type]


def _index(digest: str) -> DataIndex:
    data = tokens()
    info = ShardInfo(digest=digest, num_tokens=data.size, nbytes=data.nbytes)  # type: ignore[arg-type]
    return DataIndex(
        dtype="uint16",
        train=(info,),
        heldout=(info,),
        train_text_nbytes=data.size,
        heldout_text_nbytes=data.size,
        tokenizer=wire.digest(b"tokenizer"),
        vocab_size=VOCAB,
    )


def batches(folder: Path, split: str = "train", seq_len: int = SEQ_LEN) -> Batches:
    store = ShardStore(folder)
    return Batches(store, _index(store.put(tokens().tobytes())), split, seq_len, seed=3)  # type: ignore[arg-type]
