"""loop: see the tree in README.md."""
