"""What a learner of a run computes with and never changes: an adapter's base, a space's ends, a run's first weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from msgspec import UNSET
from torch import Tensor

from weft.chat.speech import Speech, speech_of
from weft.codec.codec import Codec
from weft.codec.dense import Bf16, Fp32
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.ids import Digest, short
from weft.model.came_with import decode
from weft.model.config import num_base_parameters
from weft.model.flat import base_layout, paste
from weft.run.config import DpoConfig, RunConfig
from weft.run.genesis import digest_of_base, initial
from weft.run.staged import StagedConfig, by_section
from weft.store.home import Home


@dataclass(frozen=True)
class Frozen:
    """
    Args:
        base: that the run's adapter goes beside, or the ends of its space, on the CPU; None: all is trained.
        reference: the parameters that the run began with, from which preferences are told; None: its loss needs none.
        speech: how answers are read; None: none are drawn.
    """

    base: Float32[Tensor, " all"] | None = None
    reference: Float32[Tensor, " num"] | None = None
    speech: Speech | None = None


LoadFrozen = Callable[[], Frozen]


def base_of(config: RunConfig, home: Home) -> Float32[Tensor, " all"] | None:
    """Return the vector of what is frozen of the run's model, of a stage its section's; None: all is trained.

    Raises:
        ConfigError: it is not in this home, or of another size than the model.
        DataError: the blob is corrupt (removed, so that it can be fetched again).
    """
    if config.base is UNSET:
        return None
    if isinstance(config, StagedConfig) and config.stage is None:
        whole = torch.empty(config.num_base)
        for cut, each in zip(config.cuts, by_section(config), strict=True):
            part = base_of(each, home)
            assert part is not None, "sections have all that the whole has"
            paste(config.model, whole, cut, part, base_layout)
        return whole
    blob, num, codec = home.blobs.open(config.base), config.num_base, codec_of_base(config)
    if blob is None:
        raise ConfigError(
            f"the weights of the run's model that nobody trains ({short(config.base)}) are not in {home.root}. "
            + (
                "Fetch the whole model from its members: weft gather -"
                if isinstance(config, StagedConfig) and config.stage is None
                else "Join the run, which fetches them: weft join -"
            )
        )
    if len(blob) != codec.nbytes(num):
        raise ConfigError(
            f"the weights of the run's model that nobody trains have {len(blob):,} bytes, and the model has "
            f"{codec.nbytes(num):,}. The run cannot be trained; tell its maker."
        )
    return codec.decode(blob, num)


def name_of_base(config: RunConfig, base: Float32[Tensor, " all"]) -> Digest:
    """Return what names the vector of what is frozen, in stages or in one piece."""
    assert config.base is not UNSET
    return digest_of_base(base) if isinstance(config, StagedConfig) else Digest(config.base)


def codec_of_base(config: RunConfig) -> Codec:
    """Return how the blob of the vector of what is frozen is encoded."""
    return Bf16() if config.base_nbytes == 2 * num_base_parameters(config.model) else Fp32()


def reference_of(config: RunConfig, home: Home) -> Float32[Tensor, " num"] | None:
    """Return the parameters that the run began with, where its loss tells preferences from them; None: it does not.

    Raises:
        ConfigError, DataError: as `initial`; they are not here.
    """
    if not isinstance(config.train.loss, DpoConfig):
        return None
    reference = initial(config, home)
    if reference is None:
        raise ConfigError(
            f"the weights that the run began with ({short(config.initial)}), from which preferences are told, are not "
            f"in {home.root}. Join the run, which fetches them: weft join -"
        )
    return reference


def frozen_section(config: StagedConfig, home: Home) -> Frozen:
    """Return what a stage computes with and never changes.

    Raises:
        ConfigError, DataError: as `base_of`.
    """
    return Frozen(base_of(config, home))


def frozen_of(config: RunConfig, home: Home, tokenizer: Tokenizer, came_with: bytes) -> Frozen:
    """Return what a learner of the run computes with and never changes.

    Args:
        came_with: the blob of what came with the model.

    Raises:
        ConfigError, DataError: as `base_of` and `reference_of`.
    """
    speech = None if config.reward is UNSET else speech_of(tokenizer, decode(came_with))
    return Frozen(base_of(config, home), reference_of(config, home), speech)
