"""link: see the tree in README.md."""
