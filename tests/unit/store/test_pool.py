"""Blocks come back once nothing refers to them, and not before."""

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.errors import DiskFull
from weft.store import pool as module
from weft.store.pool import Pool


@pytest.fixture(autouse=True)
def _small_blocks_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_NBYTES", 0)


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def test_a_block_is_used_again_once_it_is_forgotten():
    pool = Pool(1 << 20)
    first = pool.empty(1000)
    where = address(first)
    second = pool.empty(1000)
    assert address(second) != where, "it is still in use"
    del first
    gc.collect()
    assert address(pool.empty(1002)) == where


@pytest.mark.full
def test_every_view_of_a_block_keeps_it_from_others():
    pool = Pool(1 << 20)
    block = pool.block(4000)
    words = np.frombuffer(block, dtype=np.float32)[10:20]
    tensor = torch.from_numpy(words)[3:5]
    where = np.frombuffer(block, dtype=np.uint8).ctypes.data
    tensor.fill_(7.0)
    del block, words
    gc.collect()
    other = pool.empty(1000)
    assert address(other) != where
    other.zero_()
    assert tensor.tolist() == [7.0, 7.0]
    del tensor
    gc.collect()
    assert address(pool.empty(1000)) == where


def test_a_slice_of_an_array_over_a_block_keeps_it_too():
    pool = Pool(1 << 20)
    array = pool.empty(1000).numpy()
    part = array[5:6]
    where = array.ctypes.data
    del array
    gc.collect()
    assert address(pool.empty(1000)) != where
    part[0] = 1.0  # still its own


def test_a_block_much_larger_than_asked_stays_for_those_who_need_it():
    pool = Pool(1 << 20)
    where = address(pool.empty(1000))
    gc.collect()
    assert address(pool.empty(800)) != where
    assert address(pool.empty(930)) == where


@pytest.mark.full
def test_no_more_lies_free_than_is_allowed_and_the_oldest_goes_first():
    pool = Pool(10_000)
    tensors = [pool.empty(1000) for _ in range(4)]
    where = [address(tensor) for tensor in tensors]
    while tensors:
        tensors.pop(0)
        gc.collect()
    again = [pool.empty(1000) for _ in range(2)]
    assert sorted(map(address, again)) == sorted(where[2:])


def test_a_block_may_be_empty():
    pool = Pool(100)
    assert len(pool.block(0)) == 0
    assert pool.empty(0, torch.float64).dtype == torch.float64


def test_blocks_lie_in_files_without_a_name_where_that_is_asked_for(tmp_path: Path):
    pool = Pool(1 << 20, tmp_path / "scratch")
    vector = pool.empty(1000)
    vector.fill_(2.5)
    data = pool.moved(b"abc" * 100)
    assert bytes(data) == b"abc" * 100
    assert vector.sum() == 2500.0
    assert list((tmp_path / "scratch").iterdir()) == []
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / "scratch") in maps.read_text()
    where = address(vector)
    del vector
    gc.collect()
    assert address(pool.empty(1000)) == where


def test_in_memory_what_is_there_is_not_moved():
    data = b"abc"
    assert Pool(1 << 20).moved(data) is data


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(DiskFull, match="Make room"):
        Pool(1 << 20, tmp_path).block(5000)
