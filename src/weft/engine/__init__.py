"""Many texts at once from one model: pages of keys and values, which texts a step moves, and the step itself.

It knows tokens and no text, no network and no training.
"""
