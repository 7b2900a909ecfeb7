"""fork: see the tree in README.md."""
