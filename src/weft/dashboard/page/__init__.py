"""page: see the tree in README.md."""
