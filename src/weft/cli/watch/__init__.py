"""watch: see the tree in README.md."""
