"""What the benchmark of blocks says beside its losses: paired gaps, operations, and whose vectors a file holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import blocks
from benchmarks.blocks import NOISES, NUM_BLOCKS, QUARTER, SHAPE, Kept, against, operations

from weft.compose.blocks.block import block_over, fresh
from weft.compose.blocks.noise import NoiseConfig, NoiseLevels
from weft.compose.space import Space
from weft.cost.training import flops_per_token
from weft.data.rows import Batch
from weft.data.tokenizer import ByteTokenizer
from weft.model import sections
from weft.model.flat import assemble
from weft.model.initial import initial_vector
from weft.training.device import decoder

BATCH = Batch(torch.zeros(2, 32, dtype=torch.int64), torch.ones(2, 32, dtype=torch.int64))


def kept(path: Path) -> Kept:
    """Return what a file may hold of two windows: 2 nats end to end, 1.9 with its own ends, 2.1 of all else."""
    blocks_of = [f"{kind} {number}" for kind in (*NOISES, "alone") for number in range(NUM_BLOCKS)]
    names = ["space", "end to end", "own ends", *blocks_of]
    each = [
        f"{kind}, {way}"
        for kind in NOISES
        for way in (
            *(f"exit {number}" for number in range(NUM_BLOCKS)),
            "no noise",
            "draws 1, steps 1",
            "draws 1, steps 4",
            f"draws {blocks.DRAWS}",
        )
    ]
    losses = {name: [2.1, 2.3] for name in ("space", "alone 0", "ensemble", *each)}
    losses |= {"end to end": [2.0, 2.2], "own ends": [1.9, 2.1]}
    vectors = {name: torch.zeros(3) for name in names}
    seconds = dict.fromkeys(names, 10.0) | {"evaluation": 5.0}
    return Kept(path, 1.0, vectors, losses, seconds, dict.fromkeys(names, 1e12))


def test_gaps_are_paired_and_told_to_both_references() -> None:
    losses = {"one": np.array([2.0, 3.0, 4.0]), "other": np.array([1.0, 2.0, 3.3])}
    assert against(losses, "one", "other") == ["+0.9000 +- 0.1000", "+42.9 %"]
    assert against(losses, "one", "one") == ["", ""]


def test_a_row_tells_the_gap_to_an_ordinary_model_too_and_what_it_took(tmp_path: Path) -> None:
    rows = {str(row[0]): row[1:] for row in blocks.rows_of(kept(tmp_path / "file"))}
    gaps = ["+0.1000 +- 0.0000", "+4.8 %", "+0.2000 +- 0.0000", "+10.0 %"]
    for low in ("1", "0.3"):
        row = rows[f"4 blocks of 2 layers, noise from {low} lengths on, one draw"]
        assert row == ["2.2000 +- 0.1000", *gaps, "4e+12", 40]
    own = rows["the same, its own ends trained too"]
    assert own[1:] == ["-0.1000 +- 0.0000", "-4.8 %", "", "", "1e+12", 10]


def test_the_lower_range_begins_lower_and_ends_alike() -> None:
    usual, lower = (noise.config for noise in NOISES.values())
    assert usual == NoiseConfig()
    assert lower.low < usual.low
    assert lower.high == usual.high
    lowest = blocks.levels_of(NOISES["lower block"])[-1]
    assert lowest[:3] == ["from 0.3 on", NUM_BLOCKS - 1, "0.439 to 0.300"]


def test_operations_of_a_decoder_are_those_of_the_closed_form() -> None:
    flat = blocks.decoder_over(QUARTER, sections.whole(QUARTER), initial_vector(QUARTER, 1))
    found = operations(lambda batch, _: flat.module.loss(batch.tokens, batch.targets), BATCH)
    assert found == pytest.approx(flops_per_token(decoder(QUARTER), 32) * BATCH.tokens.numel(), rel=1e-6)


def test_a_block_takes_more_than_its_layers_and_less_than_twice_as_much() -> None:
    space = Space.of(assemble(QUARTER, initial_vector(QUARTER, 1)), ByteTokenizer().digest)
    body = blocks.decoder_over(
        QUARTER, blocks.body_section(QUARTER), initial_vector(QUARTER, 1, blocks.body_section(QUARTER))
    )
    flat = block_over(fresh(QUARTER, 1), QUARTER, space, NOISES["block"], (0, NUM_BLOCKS))
    alone = operations(lambda batch, _: space.loss(body.module(space.begin(batch.tokens)), batch.targets), BATCH)
    both = operations(lambda batch, step: flat.block.loss_of_step(batch.tokens, batch.targets, 1, step), BATCH)
    assert 1.4 < both / alone < 2.0


def test_a_file_goes_on_with_what_it_holds(tmp_path: Path) -> None:
    one = kept(tmp_path / "file")
    one.save()
    again = Kept.at(one.path, 1.0)
    assert again.vectors.keys() == one.vectors.keys()
    assert (again.losses, again.seconds, again.operations) == (one.losses, one.seconds, one.operations)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RATE", 1e-3), ("TOKENS", 1 << 20), ("NOISES", {"block": NoiseLevels(NoiseConfig(low=0.5), SHAPE.width)})],
)
def test_a_file_of_other_settings_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: Any
) -> None:
    one = kept(tmp_path / "file")
    one.save()
    monkeypatch.setattr(blocks, name, value)
    with pytest.raises(SystemExit, match=r"other settings than this program has now\. Give another file"):
        Kept.at(one.path, 1.0)
