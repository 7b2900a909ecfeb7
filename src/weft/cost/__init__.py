"""cost: see the tree in README.md."""
