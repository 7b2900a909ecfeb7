"""membership: see the tree in README.md."""
