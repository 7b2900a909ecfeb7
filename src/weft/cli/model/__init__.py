"""model: see the tree in README.md."""
