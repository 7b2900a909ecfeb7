"""codec: see the tree in README.md."""
