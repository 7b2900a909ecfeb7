"""blobs: see the tree in README.md."""
