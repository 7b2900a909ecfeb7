"""join: see the tree in README.md."""
