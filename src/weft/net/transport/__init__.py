"""transport: see the tree in README.md."""
