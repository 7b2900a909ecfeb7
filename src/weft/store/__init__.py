"""store: see the tree in README.md."""
