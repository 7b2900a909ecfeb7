"""doctor: see the tree in README.md."""
