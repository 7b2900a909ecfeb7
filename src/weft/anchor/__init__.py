"""anchor: see the tree in README.md."""
