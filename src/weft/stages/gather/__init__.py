"""gather: see the tree in README.md."""
