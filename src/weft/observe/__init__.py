"""observe: see the tree in README.md."""
