"""launch: see the tree in README.md."""
