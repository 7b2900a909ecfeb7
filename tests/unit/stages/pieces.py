"""A run with stages as small as can be, of which nobody trains anything."""

import msgspec

from unit.peer.tiny import MODEL, run_config
from weft.ids import Digest
from weft.pipeline.config import PipelineConfig
from weft.run.staged import staged
from weft.sync.method.presets import DdpConfig

CUT = msgspec.structs.replace(MODEL, num_layers=4, is_tied=False)
RUN = staged(run_config(DdpConfig(), CUT), tuple(Digest(digit * 64) for digit in "123"), PipelineConfig())
