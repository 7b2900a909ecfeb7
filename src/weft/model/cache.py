"""Keys and values of the tokens already read, so that the next token costs one token.

The buffers are allocated once, for the longest context; each forward pass with the cache appends what it read. All
sequences of a batch are equally long.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from weft.model.config import ModelConfig


class KVCache:
    """Room for `capacity` tokens of `batch` sequences. `length` tokens are filled."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.channels_per_head)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def append(
        self,
        layer: int,
        keys: Float[Tensor, "batch kv_heads new head"],
        values: Float[Tensor, "batch kv_heads new head"],
    ) -> tuple[Float[Tensor, "batch kv_heads all head"], Float[Tensor, "batch kv_heads all head"]]:
        """Keep what `layer` computed for the new tokens; return keys and values of all tokens so far.

        `length` moves on only with `advance`, once every layer has appended.

        Raises:
            ValueError: more tokens than there is room for.
        """
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens; {stop} were given. Make a larger one, or clear it.")
        self.keys[layer, :, :, self.length : stop] = keys
        self.values[layer, :, :, self.length : stop] = values
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as read by all layers."""
        self.length += num_tokens

    def clear(self) -> None:
        """Forget all tokens and keep the memory."""
        self.length = 0
