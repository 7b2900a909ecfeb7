"""A block as it lies in a member's folder.

folder/ config.json  model.safetensors  member.json  ...     its layers between the ends of its space: a causal decoder
        block.bin                                            what tells them of noise, and of which: this module

Without noise's share a block is a decoder of its layers (`blocks.block`), so whatever reads members reads it. Of such a
member `latents` in member.json is "noise".
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float32
from msgspec import Meta
from torch import Tensor

from weft import wire
from weft.compose.blocks.block import FlatBlock, block_layout, block_over, body_of
from weft.compose.blocks.noise import NoiseConfig, NoiseLevels
from weft.compose.space import Space
from weft.errors import ConfigError, WireError
from weft.ids import Digest, short
from weft.model.config import ModelConfig
from weft.store.chunks import raw

BLOCK = "block.bin"
FORMAT = 1
MAX_BLOCKS = 64
_MORE_NBYTES = 4096  # of a record, beside its numbers


class BlockRecord(wire.Record, frozen=True, kw_only=True):
    """
    Args:
        number: which of `num_blocks` equal parts of the noise levels is its own; 0 has the most noise.
        weights: digest of the weights of the member that it lies beside.
        numbers: of its vector, what follows the layers: little-endian fp32.
    """

    format: int = FORMAT
    number: Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    noise: NoiseConfig
    weights: Digest
    numbers: bytes


def write_block(flat: FlatBlock, folder: Path, weights: Digest) -> None:
    """Write what tells a block of noise.

    Args:
        weights: digest of the member's, whose layers are the block's.
    """
    block, vector = flat.block, flat.vector.detach().cpu()
    numbers = vector[len(body_of(block.config, vector)) :]
    record = BlockRecord(
        number=block.number,
        num_blocks=block.num_blocks,
        noise=block.levels.config,
        weights=weights,
        numbers=bytes(raw(numbers.contiguous())),
    )
    (folder / BLOCK).write_bytes(wire.encode(record))


def read_block(
    folder: Path, config: ModelConfig, weights: Digest, space: Space, body: Float32[Tensor, " part"]
) -> FlatBlock:
    """Return the block of a member.

    Args:
        weights: digest of the member's.
        body: the vector of its layers.

    Raises:
        ConfigError: there is none, or it cannot be read, or it belongs to other weights.
    """
    file, num = folder / BLOCK, block_layout(config).num_parameters - len(body)
    try:
        record = wire.decode(file.read_bytes(), BlockRecord, max_nbytes=4 * num + _MORE_NBYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: no block, for it has no {BLOCK}. `weft compose block` makes one of a member."
        ) from None
    except (OSError, WireError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Copy the member's folder again.") from None
    if record.format != FORMAT:
        raise ConfigError(
            f"{file}: format {record.format}, and this weft reads {FORMAT}. Install the one that wrote it."
        )
    if record.weights != weights or len(record.numbers) != 4 * num:
        raise ConfigError(
            f"{file} belongs to the weights {short(record.weights)}, and beside it are {short(weights)}. Copy the "
            "member's folder again."
        )
    numbers = torch.from_numpy(np.frombuffer(record.numbers, "<f4").astype(np.float32)).to(body.device)
    if not numbers.isfinite().all():
        raise ConfigError(f"{file}: holds numbers that are not finite. Copy the member's folder again.")
    levels = NoiseLevels(record.noise, space.width)
    return block_over(torch.cat((body, numbers)), config, space, levels, (record.number, record.num_blocks))
