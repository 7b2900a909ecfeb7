"""screen: see the tree in README.md."""
