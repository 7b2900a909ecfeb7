"""Text from a trained model. It knows no training and no network."""

from weft.inference.sample import Sampling, choose, generate

__all__ = ["Sampling", "choose", "generate"]
