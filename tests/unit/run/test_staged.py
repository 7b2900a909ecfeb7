"""What a run with stages and the runs of its stages have in common."""

import math

import msgspec
import pytest

from unit.peer.tiny import run_config
from unit.stages.pieces import CUT
from weft.ids import Digest
from weft.pipeline.config import PipelineConfig
from weft.run.staged import staged
from weft.sync.method.presets import DdpConfig


@pytest.mark.parametrize("is_tied", [False, True])
def test_all_pieces_together_are_clipped_as_the_whole_model(is_tied) -> None:
    whole = run_config(DdpConfig(), msgspec.structs.replace(CUT, is_tied=is_tied))
    run = staged(whole, (Digest("1" * 64),) * (3 + is_tied), PipelineConfig())
    clips = [run.of_stage(stage).train.clip for stage in range(run.num_pieces)]
    assert len(clips) == 3 + is_tied
    assert all(0 < clip < whole.train.clip for clip in clips)
    assert math.hypot(*clips) == pytest.approx(whole.train.clip)
