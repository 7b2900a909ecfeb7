"""Charters for tests: of runs that were never amended, with stewards where a test has some."""

from collections.abc import Iterable
from typing import Any

import msgspec

from weft.codec.config import CodecConfig, Fp32Config
from weft.ids import PeerId
from weft.sync.method.choices import Choices
from weft.sync.method.presets import FedAvgConfig, spell_out
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records.charter import Charter, Settings


def charter(
    samples: int = 1, stewards: Iterable[PeerId] = (), codec: CodecConfig | None = None, **settings: Any
) -> Charter:
    """Return the charter of a run that leases `samples` of 8 tokens to each member per round.

    Args:
        settings: other than usual.
    """
    method: Choices = spell_out(FedAvgConfig(every=samples, codec=codec or Fp32Config()), 1)
    now = Settings(tokens=1 << 40, seq_len=8, batch_size=1, schedule=ConstantConfig(), method=method)
    keys = tuple(sorted(stewards))
    settled = msgspec.structs.replace(now, **settings)
    return Charter(stewards=keys, serials=(0,) * len(keys), settings=settled, max_seq_len=64)
