"""The model: one decoder family, its flat vector, its first weights, and Hugging Face folders in and out.

It knows no data, no optimizer, no network.
"""

from weft.model.config import SIZES, Llama3Scaling, ModelConfig, check_size, named, num_parameters
from weft.model.flat import FlatModel, Layout, Span, assemble, attach, flatten, layout
from weft.model.initial import initial_vector
from weft.model.layers import KVCache
from weft.model.transformer import Transformer
from weft.model.weights import read_config, read_folder, write_folder

__all__ = [
    "SIZES",
    "FlatModel",
    "KVCache",
    "Layout",
    "Llama3Scaling",
    "ModelConfig",
    "Span",
    "Transformer",
    "assemble",
    "attach",
    "check_size",
    "flatten",
    "initial_vector",
    "layout",
    "named",
    "num_parameters",
    "read_config",
    "read_folder",
    "write_folder",
]
