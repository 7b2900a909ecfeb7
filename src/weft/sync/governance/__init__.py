"""governance: see the tree in README.md."""
