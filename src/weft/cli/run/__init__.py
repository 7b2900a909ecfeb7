"""run: see the tree in README.md."""
