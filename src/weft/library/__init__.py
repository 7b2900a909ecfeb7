"""The library: any PyTorch loop becomes a peer (`weft.Sync`), and `weft.train` is the verb for programs.

Importing this package loads nothing. It does not know what the loop trains.
"""
