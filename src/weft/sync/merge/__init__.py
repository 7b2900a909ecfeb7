"""merge: see the tree in README.md."""
