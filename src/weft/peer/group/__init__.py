"""group: see the tree in README.md."""
