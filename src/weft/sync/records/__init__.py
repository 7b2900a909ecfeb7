"""records: see the tree in README.md."""
