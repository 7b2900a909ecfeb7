"""round: see the tree in README.md."""
