"""demo: see the tree in README.md."""
