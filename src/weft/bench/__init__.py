"""bench: see the tree in README.md."""
