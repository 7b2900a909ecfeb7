"""train: see the tree in README.md."""
