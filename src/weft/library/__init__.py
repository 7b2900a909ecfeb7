"""The library door: any PyTorch loop becomes a peer. `weft.Sync` is in `sync`; importing this package loads nothing."""
