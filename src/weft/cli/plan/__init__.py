"""plan: see the tree in README.md."""
