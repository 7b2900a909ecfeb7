"""step: see the tree in README.md."""
