"""A model put together from sections: every number in its place, whatever pieces it comes in."""

from pathlib import Path

import pytest
import torch
from benchmarks.rig.flat import join

from unit.stages.pieces import RUN
from weft.errors import DiskFull
from weft.model.flat import cut
from weft.stages.gather import gather
from weft.stages.gather.gather import Assembled, common, in_words, stretches
from weft.store.chunks import raw


@pytest.mark.parametrize("num", [1, 7, 64, 100_000])
def test_pieces_of_any_length_make_what_join_makes(tmp_path: Path, num: int) -> None:
    vector = torch.randperm(RUN.num_parameters).float()
    parts = [cut(RUN.model, vector, section) for section in RUN.cuts]
    made = Assembled(RUN, tmp_path)
    made.vector.fill_(-1.0)
    for stage, part in enumerate(parts):
        for start in reversed(range(0, part.numel(), num)):
            made.put(stage, start, raw(part[start : start + num]))
    assert torch.equal(made.vector, join(RUN.model, parts))
    assert torch.equal(made.vector, vector)


def test_the_vector_lies_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.store.pool.LEAST_NBYTES", 1)
    scratch = tmp_path / "scratch"
    made = Assembled(RUN, scratch)
    assert scratch.is_dir()  # its file has no name
    made.put(1, 0, raw(torch.ones(8)))
    assert int(made.vector.sum()) >= 8


def test_stretches_cover_each_section_once() -> None:
    covered = torch.zeros(RUN.num_parameters, dtype=torch.int64)
    for stage, section in enumerate(RUN.cuts):
        here = list(stretches(RUN, stage))
        assert [begin for begin, _, _ in here] == [sum(num for _, _, num in here[:at]) for at in range(len(here))]
        assert sum(num for _, _, num in here) == cut(RUN.model, covered.float(), section).numel()
        for _, there, num in here:
            covered[there : there + num] += 1
    assert bool((covered == 1).all())


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 8 * RUN.num_parameters - 1

    monkeypatch.setattr(gather.shutil, "disk_usage", lambda _path: Usage)
    with pytest.raises(DiskFull, match="room"):
        Assembled(RUN, tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()


def test_the_newest_number_that_all_have_is_common() -> None:
    assert common({0: [3, 5, 7], 1: [5, 3], 2: [8, 5, 3]}) == 5
    assert common({0: [3], 1: [4]}) is None
    assert common({0: [3], 1: []}) is None


def test_words_number_stages_from_one() -> None:
    assert in_words(RUN, {1: 4, 0: 5}).endswith("round 5 for stage 1, round 4 for stage 2")
