"""Batches: every window is the stream's, whatever the shards' borders; targets are the next tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import wire
from weft.data.assign import leases, windows_at
from weft.data.batch import Batches, check_windows
from weft.data.store import DataIndex, ShardInfo, ShardStore
from weft.errors import DataError
from weft.ids import PeerId


def stored(folder: Path, num_tokens: int, shard_tokens: int, dtype: str = "uint16") -> tuple[ShardStore, DataIndex]:
    """Keep the stream 0, 1, 2, ... as both splits."""
    store = ShardStore(folder)
    infos = []
    for start in range(0, num_tokens, shard_tokens):
        data = (
            np.arange(start, min(start + shard_tokens, num_tokens)).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        )
        count = len(data) // np.dtype(dtype).itemsize
        infos.append(ShardInfo(digest=store.put(data), num_tokens=count, nbytes=len(data)))
    index = DataIndex(
        dtype=dtype,  # type: ignore[arg-type]
        train=tuple(infos),
        heldout=tuple(infos),
        train_text_nbytes=num_tokens,
        heldout_text_nbytes=num_tokens,
        tokenizer=wire.digest(b""),
        vocab_size=num_tokens,
    )
    return store, index


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 400), st.integers(25, 120), st.integers(1, 90), st.integers(0, 99))
def test_an_epoch_reads_every_window_of_the_stream_once(
    tmp_path: Path, num_tokens: int, shard_tokens: int, seq_len: int, seed: int
) -> None:
    store, index = stored(tmp_path, num_tokens, shard_tokens)
    if num_tokens <= seq_len:
        with pytest.raises(DataError, match="too small"):
            Batches(store, index, "train", seq_len, seed)
        return
    batches = Batches(store, index, "train", seq_len, seed)
    tokens, targets, _ = batches.at(np.arange(batches.num_windows))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape == (batches.num_windows, seq_len)
    assert torch.equal(targets, tokens + 1)
    assert sorted(tokens.flatten().tolist()) == list(range(batches.num_windows * seq_len))


def test_positions_give_the_windows_that_assign_names(tmp_path: Path) -> None:
    store, index = stored(tmp_path, 1000, 77, "uint32")
    batches = Batches(store, index, "train", 10, seed=5)
    granted, _ = leases(40, {PeerId("a"): 30, PeerId("b"): 50})
    for lease in granted:
        tokens, *_ = batches.at(lease.positions())
        assert (tokens[:, 0] // 10).tolist() == windows_at(lease.positions(), batches.num_windows, 5).tolist()


def test_positions_may_come_in_any_order_from_far_apart(tmp_path: Path) -> None:
    store, index = stored(tmp_path, 1000, 77)
    batches = Batches(store, index, "train", 10, seed=5)
    positions = np.random.default_rng(0).permutation(np.arange(0, 200_000, 997))
    for _ in range(2):
        tokens, *_ = batches.at(positions)
        assert (tokens[:, 0] // 10).tolist() == windows_at(positions, batches.num_windows, 5).tolist()
    with pytest.raises(ValueError, match="no window"):
        batches.at(np.array([-1]))


def test_heldout_batches_are_spread_evenly_and_always_the_same(tmp_path: Path) -> None:
    store, index = stored(tmp_path, 1001, 300)
    batches = Batches(store, index, "heldout", 10, seed=1)
    again = Batches(store, index, "heldout", 10, seed=2)
    first = [tokens for tokens, *_ in batches.heldout_batches(10, batch_size=4)]
    assert [len(tokens) for tokens in first] == [4, 4, 2]
    assert torch.equal(torch.cat(first), torch.cat([tokens for tokens, *_ in again.heldout_batches(10, batch_size=10)]))
    assert torch.cat(first)[:, 0].tolist() == list(range(0, 1000, 100))
    everything = torch.cat([tokens for tokens, *_ in batches.heldout_batches(10_000, batch_size=64)])
    assert everything.flatten().tolist() == list(range(1000))


def test_missing_shards_are_said_before_training_begins(tmp_path: Path) -> None:
    store, index = stored(tmp_path, 1000, 100)
    (tmp_path / index.train[3].digest).unlink()
    with pytest.raises(DataError, match=f"lacks 1 of 10 train shards, the first {index.train[3].digest}"):
        Batches(store, index, "train", 10, seed=0)


def test_a_shard_that_changed_on_disk_is_named_when_it_is_first_read(tmp_path: Path) -> None:
    store, index = stored(tmp_path, 1000, 100)
    path = tmp_path / index.train[3].digest
    path.chmod(0o644)
    path.write_bytes(bytes(200))
    batches = Batches(store, index, "train", 10, seed=0)
    batches.windows(np.array([0, 1]))
    with pytest.raises(DataError, match=path.name):
        batches.windows(np.array([31]))


def test_too_little_text_is_said_with_what_there_is_and_what_is_needed(tmp_path: Path) -> None:
    _, index = stored(tmp_path, 1000, 100)
    check_windows(index, "train", 100, at_least=9)
    with pytest.raises(
        DataError, match=r"1000 training tokens hold 9 windows of 100, and the run needs 10 \(1001 tokens\)"
    ):
        check_windows(index, "train", 100, at_least=10)
    with pytest.raises(DataError, match=r"held-out tokens .*raise heldout_fraction"):
        check_windows(index, "heldout", 1000, at_least=1)
