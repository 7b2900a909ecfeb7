"""method: see the tree in README.md."""
