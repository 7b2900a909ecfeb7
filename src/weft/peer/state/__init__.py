"""state: see the tree in README.md."""
