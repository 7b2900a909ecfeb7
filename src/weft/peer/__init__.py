"""A peer of a run: its settings, its training, its rounds, its coming and going. `launch` is the way in."""
